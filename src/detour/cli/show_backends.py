"""`detour show backends`: the routes that a model gets on a device. Loads no weights."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from detour.cli.target import Target
from detour.ops.route import Route


def show(target: Target) -> None:
    Console().print(routes_table(target))


def routes_table(target: Target) -> Table:
    model = target.model
    title = f"Routes: {model.config['model_type']} on {model.device.name}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    if not target.here:
        table.caption = "What a library that is missing could do is told by this machine alone."
    for name in ("op", "computed by", "then", "why the others cannot"):
        table.add_column(name, overflow="fold")
    for row in sorted(rows(model.routes.chosen)):
        table.add_row(*row)
    return table


def rows(chosen: Mapping[tuple[str, str], Route]) -> set[tuple[str, str, str, str]]:
    """One for each op and outcome: what serves, what stands behind it, and the reasons."""
    found = set()
    for (op, _), route in chosen.items():
        current, *others = [backend.name for backend in route.backends]
        lost = [f"{name}: {'; '.join(reasons)}" for name, reasons in sorted(route.lost.items())]
        found.add((op, current, ", ".join(others), "\n".join(lost)))
    return found
