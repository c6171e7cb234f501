"""`detour show`: what would be served, without serving it."""

import importlib
import sys
from collections.abc import Sequence

import yaml

from detour.config.environment import read_environment
from detour.config.parse import make_parser, parse
from detour.config.table import markdown
from detour.launch import model_path

WHAT = {
    "config": "every option and its value, as a file for --config",
    "backends": "per op, what can compute it here, and why the others cannot",
    "memory": "what the model's weights and cache take, and how much fits",
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
    parsed = parse(rest, make_parser(f"detour show {what}", WHAT[what]))
    for notice in parsed.notices:
        print(notice, file=sys.stderr)
    if what == "config":
        print(yaml.safe_dump(parsed.config.public_values(), sort_keys=False), end="")
    elif what == "flags":
        print(markdown(), end="")
    else:  # these two load torch
        path = model_path(parsed.config, read_environment())
        importlib.import_module(f"detour.cli.show_{what}").show(parsed.config, path)
    return 0
