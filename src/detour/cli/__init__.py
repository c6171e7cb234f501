"""The command line: `detour COMMAND`. Knows which command lives where; each command is one module.

A command is loaded when it is called: the process of `detour serve` needs no torch and loads none.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from detour import __version__
from detour.errors import ConfigError, DetourError

# command -> (module with main(argv) -> exit status, what it does)
COMMANDS = {
    "serve": ("detour.cli.serve", "serve a model over HTTP"),
    "chat": ("detour.cli.chat", "talk to a model in this terminal"),
    "generate": ("detour.cli.generate", "continue prompts of a file, without a server"),
    "bench": ("detour.cli.bench", "put load on a server and measure it"),
    "show": ("detour.cli.show", "show config, backends, memory or flags"),
    "quantize": ("detour.cli.quantize", "make a checkpoint with NVFP4 or FP8 weights"),
    "doctor": ("detour.cli.doctor", "say whether a model would fit and run, without loading it"),
    "fetch": ("detour.cli.fetch", "download a model and print where it lies"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. A person's mistake is one sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"detour {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(COMMANDS)}."
        print(f"detour: there is no command {name}. {hint}", file=sys.stderr)
        return 2
    return run(name, words[1:])


def run(name: str, argv: Sequence[str]) -> int:
    """Runs the command called `name`."""
    try:
        status: int = importlib.import_module(COMMANDS[name][0]).main(argv)
        return status
    except DetourError as error:
        print(f"detour {name}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        return 1


def _help() -> str:
    lines = [f"  {name:9} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["Usage: detour COMMAND [arguments]", "", *lines, "", "`detour COMMAND --help` says more."]
    )
