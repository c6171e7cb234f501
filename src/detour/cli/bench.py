"""`detour bench`: loads and measurements. What they do is in detour.bench."""

import importlib
import sys
from collections.abc import Sequence

BENCHES = {
    "serve": ("detour.bench.serving", "drive an OpenAI or native endpoint, print figures"),
    "offline": ("detour.cli.bench_offline", "time steps of a fixed batch, without a server"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        known = "\n".join(f"  {name:9} {what}" for name, (_, what) in BENCHES.items())
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        print(
            f"Usage: detour bench WHAT [arguments]\n\n{known}",
            file=sys.stdout if asked_for_help else sys.stderr,
        )
        return 0 if asked_for_help else 2
    status: int = importlib.import_module(BENCHES[argv[0]][0]).main(argv[1:])
    return status
