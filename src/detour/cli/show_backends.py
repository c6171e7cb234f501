"""`detour show backends`: the routes that a model gets here. Loads the model to know them."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from detour.config.options import Config
from detour.launch_engine import worker_settings
from detour.ops.route import Route
from detour.worker.build import build_model


def show(config: Config, model: Path) -> None:
    built = build_model(worker_settings(config, model, seed=0))
    table = Table(title=f"{model.name} on {built.site.device.name}", title_justify="left")
    for title in ("op", "computed by", "then", "why the others cannot"):
        table.add_column(title, overflow="fold")
    for row in sorted(rows(built.site.routes.chosen)):
        table.add_row(*row)
    Console().print(table)


def rows(chosen: dict[tuple[str, str], Route]) -> set[tuple[str, str, str, str]]:
    """One for each op and outcome: what serves, what stands behind it, and the reasons."""
    found = set()
    for (op, _), route in chosen.items():
        current, *others = [backend.name for backend in route.backends]
        lost = [f"{name}: {'; '.join(reasons)}" for name, reasons in sorted(route.lost.items())]
        found.add((op, current, ", ".join(others), "\n".join(lost)))
    return found
