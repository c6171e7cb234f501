"""How much a worker can hold: measured, not assumed. Builds the whole worker from settings."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from detour.engine.plan import Admitted, Geometry, StepPlan
from detour.errors import ConfigError
from detour.loading.model_config import eos_ids
from detour.ops import native
from detour.ops.route import Routes
from detour.ops.sampling import draw, greedy
from detour.sampling_params import SamplingParams
from detour.worker.build import BuiltModel, build_model
from detour.worker.cuda_graphs import capture_all, graph_bytes
from detour.worker.kv_cache import KVCache, bytes_per_token, cpu_budget, pages_for
from detour.worker.runner import Runner
from detour.worker.sampler import Sampler
from detour.worker.settings import WorkerSettings
from detour.worker.staging import Staging

log = logging.getLogger(__name__)

TRIAL_STEPS = 3  # a step is timed so often; the fastest counts
TRIAL_ROWS = 8  # decodes in a timed step
TRIAL_LENGTH = 32  # tokens of each


@dataclass(frozen=True)
class Worker:
    built: BuiltModel
    runner: Runner
    geometry: Geometry
    threads: int

    def backends(self) -> dict[str, str]:
        """Op to backend; where needs differ, all in use."""
        used: dict[str, list[str]] = {}
        for (name, _), route in self.built.site.routes.chosen.items():
            names = used.setdefault(name, [])
            if route.current.name not in names:
                names.append(route.current.name)
        return {name: ", ".join(names) for name, names in used.items()}


def start_worker(settings: WorkerSettings) -> Worker:
    """Load the model and give it all the memory it may have.

    Call it on the thread that will run the steps: thread counts belong to a thread.
    Raises CheckpointError and ConfigError.
    """
    threads = settings.threads
    on_cpu = not (settings.device.startswith("cuda") or torch.cuda.is_available())
    if threads and on_cpu:
        torch.set_num_threads(threads)
    built = build_model(settings)
    context = context_length(settings, built)
    eos = eos_ids(settings.model)
    tiny = _runner(settings, built, 2, context, eos)
    if built.site.device.is_cuda:
        budget = _gpu_budget(settings, tiny, context)
        if sizes := _graph_sizes(settings, built):
            budget -= graph_bytes(tiny.graphs, sizes, built.site.device.torch_device)
        threads = 0
    else:
        threads = threads or _fastest_threads(tiny, built.site.routes)
        _use_threads(threads, built.site.routes)
        budget = cpu_budget(settings.memory_fraction, asked=settings.max_total_tokens > 0)
    del tiny
    budget -= built.model.transient_bytes(settings.max_step_tokens, context)
    spec = built.model.kv_spec
    wanted = settings.max_total_tokens or settings.max_slots * context
    num_pages = pages_for(budget, spec, settings.page_size, wanted)
    held = (num_pages - 1) * settings.page_size
    if held < min(settings.max_total_tokens, wanted):
        log.warning(
            "max_total_tokens is %d, but memory holds %d tokens", settings.max_total_tokens, held
        )
    if held < context:
        log.warning("context length is %d tokens instead of %d: KV memory", held, context)
        context = held
    runner = _runner(settings, built, num_pages, context, eos)
    if sizes := _graph_sizes(settings, built):
        capture_all(runner.graphs, sizes, built.site.device.torch_device)
    geometry = Geometry(
        num_pages=num_pages,
        page_size=settings.page_size,
        max_slots=settings.max_slots,
        context_length=context,
        vocab_size=built.model.vocab_size,
        kv_bytes_per_token=bytes_per_token(spec),
        eos_ids=eos,
    )
    return Worker(built, runner, geometry, threads)


def context_length(settings: WorkerSettings, built: BuiltModel) -> int:
    """Raises ConfigError, with both numbers, where more is asked than the model is made for."""
    longest = built.model.longest_context
    if settings.context_length > longest:
        raise ConfigError(
            f"context_length is {settings.context_length}, but the model is made for {longest} "
            "tokens; a configuration override of max_position_embeddings can say otherwise.",
            param="context_length",
        )
    return settings.context_length or longest


def _graph_sizes(settings: WorkerSettings, built: BuiltModel) -> tuple[int, ...]:
    """Those asked for, none where a backend in use cannot be replayed; a log line says which."""
    if not built.site.device.is_cuda:
        return ()
    for route in built.site.routes.chosen.values():
        if settings.graph_sizes and not route.current.replays:
            name = f"{route.op.name}'s {route.current.name}"
            log.info("steps run without CUDA graphs: %s backend counts on the host", name)
            return ()
    return settings.graph_sizes


def _runner(
    settings: WorkerSettings, built: BuiltModel, num_pages: int, context: int, eos: Sequence[int]
) -> Runner:
    model, device = built.model, built.site.device.torch_device
    need = {"dtype": torch.float32, "vocab_size": model.vocab_size}
    draws, choices = (built.site.routes.route(op, need) for op in (draw, greedy))
    return Runner(
        model,
        KVCache(model.kv_spec, num_pages, settings.page_size, device),
        Sampler(settings.max_slots, model.vocab_size, device, eos, draws, choices),
        Staging(settings.max_slots, context, settings.page_size, device),
        device,
    )


def trial_plan(rows: int, tokens: int, start: int, length: int, params: SamplingParams) -> StepPlan:
    """A step of `rows` sampled rows and `tokens` tokens in page 0, as far as `length` allows.

    One row takes all tokens that the others, of one each, leave over; a row is at most
    length - start long.
    """
    first = max(1, min(tokens - rows + 1, length - start))
    counts = np.ones(rows, np.int32)
    counts[0] = first
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, start, np.int32),
        counts=counts,
        tokens=np.zeros(int(counts.sum()), np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_logprobs=np.full(rows, -1, np.int32),
        table_slots=none,
        table_columns=none,
        table_pages=none,
        admitted=tuple(Admitted(row, params, 1, np.zeros(1, np.int32)) for row in range(rows)),
    )


def _gpu_budget(settings: WorkerSettings, runner: Runner, context: int) -> int:
    """Bytes for KV: the share asked for, less what is taken and what the largest step takes."""
    rows = min(settings.max_slots, settings.max_step_tokens)
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1)
    plan = trial_plan(rows, settings.max_step_tokens, 0, context, params)
    runner.run(plan).wait()  # loads kernels and library handles
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    runner.run(plan).wait()
    torch.cuda.synchronize()
    transient = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    budget = int(total * settings.memory_fraction) - (total - free) - transient
    log.info(
        "GPU memory: %.2f GB taken, %.2f GB for the largest step, %.2f GB for KV",
        (total - free) / 1e9,
        transient / 1e9,
        budget / 1e9,
    )
    return budget


def _fastest_threads(runner: Runner, routes: Routes) -> int:
    """The number of compute threads, of 1, 2, 4, ... and all cores, that decodes fastest."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1 << bit for bit in range(cores.bit_length()) if 1 << bit <= cores} | {cores})
    if len(counts) == 1:
        return 1
    rows = min(TRIAL_ROWS, runner.staging.max_slots)
    length = min(TRIAL_LENGTH, runner.staging.columns * runner.staging.page_size)
    plan = trial_plan(rows, rows, length - 1, length, SamplingParams(temperature=0.0))
    seconds = {}
    for count in counts:
        _use_threads(count, routes)
        seconds[count] = min(_timed(runner, plan) for _ in range(TRIAL_STEPS))
    best = min(seconds, key=lambda count: seconds[count])
    told = ", ".join(f"{count}: {1000 * each:.1f} ms" for count, each in seconds.items())
    log.info("compute threads: %d (a step of %d decodes takes %s)", best, rows, told)
    return best


def _use_threads(count: int, routes: Routes) -> None:
    """Have kernels work on `count` threads.

    Where all are native, torch gets one: its threads would wait at the end of every small operation
    for a core that another process uses, which native.pool's do not.
    """
    all_native = all(route.current.name.startswith("native") for route in routes.chosen.values())
    native.set_threads(count)
    torch.set_num_threads(1 if all_native else count)


def _timed(runner: Runner, plan: StepPlan) -> float:
    begun = time.perf_counter()
    runner.run(plan).wait()
    return time.perf_counter() - begun
