"""`detour serve`: the server, until it is told to stop."""

import logging
import sys
from collections.abc import Sequence

from detour import logs
from detour.config.environment import read_environment
from detour.config.parse import make_parser, parse
from detour.launch import serve

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parsed = parse(argv, make_parser("detour serve", "Serve a model over HTTP."))
    logs.set_up(parsed.config.log_level, "front")
    for notice in parsed.notices:
        log.warning(notice)
    return serve(parsed.config, read_environment(), say)


def say(line: str) -> None:
    print(line, flush=True, file=sys.stdout)
