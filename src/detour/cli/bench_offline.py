"""`detour bench offline`: how long steps of a fixed batch take, without HTTP and without a scheduler.

The model gets the server's options; --load-format dummy needs a configuration alone. On a GPU whose
ceilings are known each figure stands beside the least time such a step can take.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from detour.config.environment import read_environment
from detour.config.options import Config
from detour.config.parse import make_parser, parse
from detour.errors import ConfigError
from detour.launch_engine import worker_settings
from detour.loading.hub import resolve_model
from detour.sampling_params import SamplingParams
from detour.worker.capacity import Worker, start_worker
from detour.worker.chips import chip_of
from detour.worker.cuda_graphs import decode_sizes
from detour.worker.outline import outline
from detour.worker.roofline import decode_bound
from detour.worker.settings import WorkerSettings
from detour.worker.steady import WARM, SteadyBatch

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0, seed=1),
    "top-p": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
}


@dataclass(frozen=True)
class Measured:
    """One row: a decode step, or with `tokens` > `sequences` a step of prompts.

    experts: of a layer that these tokens go to, where routing is simulated, in the mean.
    """

    sequences: int
    context: int
    tokens: int  # of a step
    milliseconds: float
    bound_milliseconds: float  # 0 = nothing is known of the device
    experts: float  # 0 = routing is not simulated

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds


def main(argv: Sequence[str]) -> int:
    what = "Time decode steps and prompts of a fixed batch, beside the least time they can take."
    parser = make_parser("detour bench offline", what)
    add_arguments(parser)
    parsed = parse(argv, parser)
    rest = parsed.rest
    for name in ("batch", "context", "steps"):
        values = vars(rest)[name]
        if min(values if isinstance(values, list) else [values]) < 1:
            raise ConfigError(f"--{name} takes positive whole numbers.")
    settings = fixed_settings(parsed.config, rest)
    worker = start_worker(settings)
    console = Console()
    console.print(heading(worker, settings, rest.sampling), markup=False, highlight=False)
    rows = list(measure(worker, settings, rest))
    console.print(table_of(rows))
    if rest.profile and worker.built.site.device.is_cuda:
        for count in rest.batch:
            console.print(f"Kernels of a step of {count}:", highlight=False)
            batch = steady(worker, settings, count, rest)
            console.print(batch.profile(4), markup=False, highlight=False)
    if rest.json:
        Path(rest.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--batch", type=int, nargs="+", metavar="N", default=[1, 8, 64], help="sequences at once"
    )
    group.add_argument("--context", type=int, default=1536, metavar="N", help="tokens of each")
    group.add_argument("--steps", type=int, default=40, metavar="N", help="steps of a figure")
    group.add_argument(
        "--sampling", choices=sorted(SAMPLING), default="greedy", help="how tokens are chosen"
    )
    group.add_argument(
        "--simulate-routing",
        choices=("none", "uniform"),
        default="none",
        help="uniform sends tokens to experts drawn evenly, as trained routers nearly do",
    )
    group.add_argument("--prompts", action="store_true", help="steps of whole prompts too")
    group.add_argument("--profile", action="store_true", help="kernel by kernel, on a GPU")
    group.add_argument("--json", default="", metavar="FILE", help="write the figures here too")


def fixed_settings(config: Config, rest: argparse.Namespace) -> WorkerSettings:
    """Those of a server, with room for the largest batch and graphs of the asked sizes alone."""
    path = Path(config.model)
    if path.suffix != ".json" or not path.is_file():
        environment = read_environment()
        cache = Path(config.cache_dir).expanduser() if config.cache_dir else environment.cache_dir
        offline, token = environment.hub_offline, environment.hub_token
        path = resolve_model(
            config.model, cache, revision=config.revision, token=token, offline=offline
        )
    most, long = max(rest.batch), rest.context + rest.steps + WARM + 1
    settings = worker_settings(config, path, seed=max(config.random_seed, 0))
    page = settings.page_size
    sizes = decode_sizes(most, config.cuda_graph_bs) if settings.graph_sizes else ()
    return replace(
        settings,
        max_slots=most,
        even_routing=rest.simulate_routing == "uniform",
        context_length=-(-long // page) * page,
        max_total_tokens=most * -(-long // page) * page,
        max_step_tokens=most + settings.max_step_tokens - settings.max_slots,
        graph_sizes=tuple({min((s for s in sizes if s >= b), default=b) for b in rest.batch})
        if sizes
        else (),
    )


def heading(worker: Worker, settings: WorkerSettings, sampling: str) -> str:
    site, graphs = worker.built.site, worker.runner.graphs.captured
    kind = str(site.dtype).removeprefix("torch.")
    return (
        f"{settings.model.name} on {site.device.name}, {kind}, "
        f"{worker.built.weight_bytes / 1e9:.2f} GB of weights, {sampling} tokens, "
        f"{'decode graphs' if graphs else 'no graphs'}"
    )


def steady(
    worker: Worker, settings: WorkerSettings, count: int, rest: argparse.Namespace
) -> SteadyBatch:
    chunk = settings.max_step_tokens - settings.max_slots
    more = rest.steps + WARM + 1
    return SteadyBatch(worker, count, rest.context, more, chunk, SAMPLING[rest.sampling])


def measure(
    worker: Worker, settings: WorkerSettings, rest: argparse.Namespace
) -> Iterator[Measured]:
    model = outline(settings, worker.built.site.device)
    chip = chip_of(worker.built.site.device)
    for count in rest.batch:
        batch = steady(worker, settings, count, rest)
        batch.fill()
        seconds = batch.decode(rest.steps)
        bound = decode_bound(model, chip, count, rest.context).seconds if chip else 0.0
        hit = covered(worker, count)
        yield Measured(count, rest.context, count, 1e3 * seconds, 1e3 * bound, hit)
    if rest.prompts:
        batch = steady(worker, settings, max(rest.batch), rest)
        seconds, tokens = batch.prompts(max(2, rest.steps // 10))
        each = min(rest.context, tokens)
        hit = covered(worker, tokens)
        yield Measured(tokens // each, each, tokens, 1e3 * seconds, 0.0, hit)


def covered(worker: Worker, tokens: int) -> float:
    """Experts of a layer that a step of so many tokens goes to, where routing is simulated."""
    routers = worker.built.site.routers
    return sum(router.covered(tokens) for router in routers) / max(1, len(routers))


def table_of(rows: Sequence[Measured]) -> Table:
    table = Table()
    for name in (
        "rows",
        "context",
        "step",
        "ms",
        "tok/s",
        "bound ms",
        "of it",
        "experts",
    ):
        table.add_column(name, justify="left" if name == "step" else "right")
    for row in rows:
        known = row.bound_milliseconds > 0
        table.add_row(
            f"{row.sequences:,}",
            f"{row.context:,}",
            "decode" if row.tokens == row.sequences else "prompts",
            f"{row.milliseconds:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.bound_milliseconds:.2f}" if known else "",
            f"{row.bound_milliseconds / row.milliseconds:.0%}" if known else "",
            f"{row.experts:.0f}" if row.experts else "",
        )
    return table
