"""`detour show`: what would be served, without serving it."""

import importlib
import sys
from collections.abc import Sequence

import yaml

from detour.config.parse import make_parser, parse
from detour.config.table import markdown

WHAT = {
    "config": "every option and its value, as a file for --config",
    "backends": "per op, what can compute it, and why the others cannot",
    "memory": "what the model's weights and cache take, how much fits, how fast it could be",
    "flags": "every flag, as Markdown",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in WHAT:
        lines = "\n".join(f"  {name:9} {what}" for name, what in WHAT.items())
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        print(
            f"Usage: detour show WHAT [options of detour serve]\n\n{lines}",
            file=sys.stdout if asked_for_help else sys.stderr,
        )
        return 0 if asked_for_help else 2
    what, rest = argv[0], argv[1:]
    parser = make_parser(f"detour show {what}", WHAT[what])
    about_model = what in ("backends", "memory")
    if about_model:
        target = importlib.import_module("detour.cli.target")  # loads torch
        target.add_arguments(parser)
    parsed = parse(rest, parser)
    for notice in parsed.notices:
        print(notice, file=sys.stderr)
    if what == "config":
        print(yaml.safe_dump(parsed.config.public_values(), sort_keys=False), end="")
    elif what == "flags":
        print(markdown(), end="")
    else:
        show = importlib.import_module(f"detour.cli.show_{what}").show
        show(target.read_target(parsed))
    return 0
