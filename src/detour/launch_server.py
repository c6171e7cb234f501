"""`python -m detour.launch_server` is `detour serve`, for scripts written for SGLang."""

import sys

from detour.cli import run

if __name__ == "__main__":
    raise SystemExit(run("serve", sys.argv[1:]))
