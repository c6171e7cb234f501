"""`detour fetch`: get a model onto this disk, for a server that will have no network."""

from collections.abc import Sequence

from detour.config.environment import read_environment
from detour.config.parse import make_parser, parse
from detour.launch import model_path


def main(argv: Sequence[str]) -> int:
    parser = make_parser("detour fetch", "Download a model and print where it lies.")
    print(model_path(parse(argv, parser).config, read_environment()))
    return 0
