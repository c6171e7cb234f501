"""The model and the device that `show memory`, `show backends` and `doctor` speak of."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from detour.config.environment import read_environment
from detour.config.parse import Parsed
from detour.errors import ConfigError
from detour.launch import model_path
from detour.launch_engine import ON_GPU, worker_settings
from detour.worker.build import choose_device
from detour.worker.chips import CHIPS, Chip, chip_of
from detour.worker.forecast import Forecast, forecast
from detour.worker.outline import Outline, outline
from detour.worker.settings import WorkerSettings

RANK_FLAGS = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")  # not served yet
CONCURRENCIES = (1, 8, 64, 256, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where, and for how many")
    group.add_argument(
        "--gpu", choices=sorted(CHIPS), default="", help="plan for this GPU instead of this machine"
    )
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        default=list(CONCURRENCIES),
        help="sequences at once, for the bounds of a step",
    )
    group.add_argument(
        "--mean-context", type=int, metavar="N", default=1536, help="tokens of each, on average"
    )


@dataclass(frozen=True)
class Target:
    settings: WorkerSettings
    model: Outline
    fits: Forecast
    chip: Chip | None  # None = nothing is known of the device's speed
    here: bool  # the device is this machine's
    concurrencies: tuple[int, ...]
    mean_context: int


def read_target(parsed: Parsed) -> Target:
    """Raises CheckpointError and ConfigError. Reads no weights."""
    config, rest = parsed.config, parsed.rest
    path = Path(config.model)
    if path.suffix != ".json" or not path.is_file():
        path = model_path(config, read_environment(), weights=False)
    asked = CHIPS[rest.gpu] if rest.gpu else None
    settings = worker_settings(config, path, seed=0, chosen=ON_GPU if asked else None)
    device = asked.device if asked else choose_device(config.device)
    model = outline(settings, device, ranks(parsed))
    return Target(
        settings=settings,
        model=model,
        fits=forecast(settings, model, asked),
        chip=asked or chip_of(device),
        here=asked is None,
        concurrencies=tuple(max(1, each) for each in rest.concurrency),
        mean_context=max(1, rest.mean_context),
    )


def ranks(parsed: Parsed) -> int:
    """Of a tensor-parallel group, as the flag that a server would be started with says."""
    said = [value for flag, value in parsed.rest.accepted or [] if flag in RANK_FLAGS]
    try:
        count = int(said[-1]) if said else 1
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{RANK_FLAGS[0]} takes a number of ranks, not {said[-1]!r}.")
    return count
