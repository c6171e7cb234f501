"""`detour show memory`: what a model takes here, and how much fits beside it. Loads the model."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from detour.config.options import Config
from detour.launch_engine import worker_settings
from detour.worker.capacity import start_worker


def show(config: Config, model: Path) -> None:
    worker = start_worker(worker_settings(config, model, seed=0))
    geometry = worker.geometry
    tokens = (geometry.num_pages - 1) * geometry.page_size
    table = Table(title=f"{model.name} on {worker.built.site.device.name}", title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    for what, amount in (
        ("weights", megabytes(worker.built.weight_bytes)),
        ("KV cache", megabytes(worker.runner.kv.nbytes)),
        ("KV cache of a token", f"{geometry.kv_bytes_per_token:,} bytes"),
        ("tokens that fit", f"{tokens:,}"),
        ("page", f"{geometry.page_size} tokens"),
        ("context of a sequence", f"{geometry.context_length:,} tokens"),
        ("sequences at once", f"{geometry.max_slots:,}"),
        ("  of full context", f"{tokens // geometry.context_length:,}"),
    ):
        table.add_row(what, amount)
    Console().print(table)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
