"""`detour doctor`: would this command line serve this model here? Without loading a weight."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

from rich.console import Console

from detour.cli.show_backends import routes_table
from detour.cli.show_memory import bounds_table, room_table, weights_table
from detour.cli.target import RANK_FLAGS, add_arguments, read_target
from detour.config.conflicts import conflicts
from detour.config.parse import make_parser, parse
from detour.worker.checkup import problems, surprises


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    log = logging.getLogger("detour")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def main(argv: Sequence[str]) -> int:
    """0 = it would serve; 1 = something has to be changed first."""
    what = "Say whether a model would fit and run, and how fast at best, without loading it."
    parser = make_parser("detour doctor", what)
    add_arguments(parser)
    parsed = parse(argv, parser)
    with _silence():  # what is warned of is said below
        target = read_target(parsed)
    console = Console()
    for table in (weights_table(target), room_table(target), routes_table(target)):
        console.print(table)
    if target.chip is not None:
        console.print(bounds_table(target))
    absent = [notice for notice in parsed.notices if notice.startswith(tuple(RANK_FLAGS))]
    alone = target.model.ranks == 1
    wrong = problems(target.settings, target.model, target.fits) + ([] if alone else absent)
    odd = [
        *conflicts(parsed.config),
        *surprises(target.settings, target.model, target.fits),
        *(notice for notice in parsed.notices if notice not in wrong),
    ]
    for title, sentences in (("To be changed", wrong), ("To know", odd)):
        if sentences:
            console.print(f"{title}:")
            for sentence in dict.fromkeys(sentences):
                console.print(f"- {sentence}", markup=False, highlight=False)
    if not wrong:
        console.print("It would serve." if not odd else "It would serve, as said above.")
    return 1 if wrong else 0
