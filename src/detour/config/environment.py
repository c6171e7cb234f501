"""The environment: the one place of the package that reads it.

DETOUR_CACHE    folder for downloaded models; default $XDG_CACHE_HOME/detour, else ~/.cache/detour
DETOUR_API_KEY  the key clients must send, where no --api-key is given (a flag is visible in `ps`)
HF_TOKEN        sent to the hub for models that need a licence
HF_HUB_OFFLINE  1: never ask the hub
COLUMNS         (read by argparse and rich) width of the terminal
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    cache_dir: Path
    api_key: str
    hub_token: str
    hub_offline: bool


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    home = variables.get("XDG_CACHE_HOME") or "~/.cache"
    return Environment(
        cache_dir=Path(variables.get("DETOUR_CACHE") or f"{home}/detour").expanduser(),
        api_key=variables.get("DETOUR_API_KEY", ""),
        hub_token=variables.get("HF_TOKEN", ""),
        hub_offline=variables.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
    )


def child_environment() -> dict[str, str]:
    """What a process that we start gets: our own environment."""
    return dict(os.environ)
