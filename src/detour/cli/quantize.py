"""`detour quantize`: a plain checkpoint in, one with NVFP4 or FP8 weights out."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from detour.config.environment import read_environment
from detour.config.options import Config
from detour.launch import model_path
from detour.loading.quantize import FORMS, Errors, Job, open_job, run
from detour.models import find


def main(argv: Sequence[str]) -> int:
    wanted = _parser().parse_args(argv)
    source = model_path(Config(model=wanted.source), read_environment())
    job = open_job(source, Path(wanted.target), wanted.form, wanted.choice, wanted.ignore)
    find(job.config)  # an architecture that is not here is refused before anything is written
    bar = Progress(
        TextColumn("Quantising"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("", total=job.nbytes)
        errors = run(job, lambda amount: bar.advance(task, amount))
    _print(job, errors)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="detour quantize",
        description="Quantise a checkpoint file by file. Killed, it goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="a folder of safetensors, or a hub id")
    parser.add_argument("target", metavar="DST", help="a folder that is not there yet")
    parser.add_argument(
        "--format",
        dest="form",
        required=True,
        choices=FORMS,
        help="nvfp4: 4.5 bits a weight, as ModelOpt lays it out; fp8: e4m3 in blocks of 128 x 128",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--experts-only",
        dest="choice",
        action="store_const",
        const="experts",
        default="auto",
        help="routed experts alone: what nvfp4 does by default where there are any",
    )
    which.add_argument(
        "--all-linears",
        dest="choice",
        action="store_const",
        const="linears",
        help="every linear layer but routers and the head: what fp8 does by default",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave the modules plain whose names it matches; may repeat",
    )
    return parser


def _print(job: Job, errors: Mapping[int, Errors]) -> None:
    table = Table(title=f"{job.target.name}: what was lost", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("matrices", justify="right")
    table.add_column("relative RMS", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("where", overflow="fold")
    total = Errors()
    for layer, one in errors.items():
        total = total.and_those(one)
        table.add_row(*_cells(str(layer), one))
    table.add_section()
    table.add_row(*_cells("all", total))
    Console().print(table)
    after = sum(file.stat().st_size for file in job.target.glob("*.safetensors"))
    print(f"{job.target}: {after / 1e6:,.1f} MB instead of {job.nbytes / 1e6:,.1f} MB")


def _cells(what: str, errors: Errors) -> tuple[str, ...]:
    relative, worst = (f"{100 * value:.2f} %" for value in (errors.relative, errors.worst))
    return what, f"{errors.matrices:,}", relative, worst, errors.where
