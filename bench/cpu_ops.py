"""The CPU path against what the machine can do: each op by shape, then whole steps of a model.

    python bench/cpu_ops.py [model.gguf or folder] [--dtype bfloat16] [--threads N] [--steps-only]

Ceilings are measured first: multiply-adds that never touch memory, and a plain read of memory. Times
are the best of several runs (a busy machine only ever adds to them).
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from detour.engine.plan import Admitted, StepPlan
from detour.ops import native
from detour.ops.attention import AttentionShape, attention, make_batch
from detour.ops.device import probe
from detour.ops.gemm import gemm, random_weight
from detour.ops.kv_layout import grouped_query
from detour.ops.norm import add_rms_norm
from detour.ops.op import Op
from detour.ops.route import Routes
from detour.ops.sampling import draw, greedy
from detour.ops.silu_mul import silu_mul
from detour.sampling_params import SamplingParams
from detour.worker.build import DTYPES
from detour.worker.capacity import Worker, start_worker
from detour.worker.settings import WorkerSettings

CPU = torch.device("cpu")
# Outputs and inputs of SmolLM2-135M's products: qkv, out, gate and up, down, head.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))


def best_of(call: Callable[[], object], seconds: float = 0.3) -> float:
    """Seconds of the fastest call among those that fit in `seconds`, at least three."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


class Ceilings:
    """FLOP/s in `dtype` and bytes/s that `threads` threads reach at most."""

    def __init__(self, threads: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        large = torch.ones(64 << 20)
        self.bandwidth = large.nbytes / best_of(large.sum, 1.0)
        square = torch.ones(1024, 1024, dtype=dtype)
        self.flops = 2 * 1024**3 / best_of(lambda: square @ square)
        if not native.reasons(probe("cpu")):
            rate = ctypes.c_double()
            for _ in range(5):
                name = "detour_bf16_rate" if dtype is torch.bfloat16 else "detour_fma_rate"
                native.function(name, "pi")(ctypes.addressof(rate), threads)
                self.flops = max(self.flops, rate.value)
        print(
            f"ceilings, {threads} threads: {self.flops / 1e9:.0f} GFLOP/s {dtype}, "
            f"{self.bandwidth / 1e9:.1f} GB/s\n"
        )

    def line(self, name: str, seconds: float, moved: float, flops: float) -> None:
        """The larger of the two shares is what the call is worth: its bound over its time."""
        bound = max(moved / self.bandwidth, flops / self.flops)
        kind = "bytes" if moved / self.bandwidth > flops / self.flops else "FLOPs"
        print(
            f"{name:44} {seconds * 1e6:10.0f} us {moved / seconds / 1e9:7.1f} GB/s "
            f"{flops / seconds / 1e9:7.1f} GFLOP/s {bound / seconds:5.0%} of the {kind} bound"
        )


def products(routes: Routes, ceilings: Ceilings) -> None:
    source = torch.Generator().manual_seed(1)
    no_bias = torch.zeros(0, dtype=ceilings.dtype)
    for packing in ("Q4_1", "Q8_0", "dense"):
        for rows, columns in SHAPES:
            stored = ceilings.dtype if packing == "dense" else torch.uint8
            need = {"packing": packing, "dtype": ceilings.dtype, "stored": stored}
            need |= {"rows": rows, "columns": columns}
            route = routes.route(gemm, need)
            made = random_weight(packing, rows, columns, source)
            kept = tuple(tensor.to(stored) for tensor in made.tensors)
            weight = route.plan(replace(made, tensors=kept))
            size = sum(tensor.nbytes for tensor in kept)
            for tokens in (1, 8, 32, 128, 512):
                x = torch.randn(tokens, columns, generator=source).to(ceilings.dtype)
                seconds = best_of(lambda: route(weight, x, no_bias))  # noqa: B023
                moved = size + ceilings.dtype.itemsize * tokens * (rows + columns)
                name = f"gemm {packing} {tokens} x {columns} x {rows} ({route.current.name})"
                ceilings.line(name, seconds, moved, 2.0 * tokens * rows * columns)


def attentions(routes: Routes, ceilings: Ceilings) -> None:
    source = torch.Generator().manual_seed(2)
    layout = grouped_query(ceilings.dtype, 3, 64)
    shape = AttentionShape(9, 3, 64, 0.125, layout)
    need = {"dtype": ceilings.dtype, "heads": 9, "kv_heads": 3, "head_dim": 64, "layout": layout}
    route = routes.route(attention, need)
    cases = [
        ([(context - 1, 1)] * n, f"{n} decodes at {context}")
        for n, context in ((1, 200), (32, 200), (1, 8000))
    ]
    cases += [([(0, 128)] * 4, "4 prompts of 128"), ([(0, 2048)], "1 prompt of 2048")]
    for rows, name in cases:
        batch = make_batch(rows, 16, CPU, source)
        pages = int(batch.page_table.max()) + 1
        caches = torch.randn(2, pages, 16, 3, 64, generator=source).to(ceilings.dtype)
        q = torch.randn(len(batch.positions), 9, 64, generator=source).to(ceilings.dtype)
        plan = route.plan(batch, shape)
        seconds = best_of(lambda: route(plan, q, caches[0], caches[1]))  # noqa: B023
        pairs = float((batch.positions + 1).sum())
        moved = float(batch.lengths.sum()) * 2 * 3 * 64 * ceilings.dtype.itemsize
        ceilings.line(
            f"attention, {name} ({route.current.name})", seconds, moved, pairs * 9 * 64 * 4
        )


def small(routes: Routes, ceilings: Ceilings) -> None:
    def named(op: Op, tokens: int, call: Callable[..., object], moved: float) -> None:
        ceilings.line(f"{op.name}, {tokens} rows", best_of(lambda: call()), moved, moved / 4)

    for tokens in (1, 32, 512):
        x = torch.randn(tokens, 576).to(ceilings.dtype)
        weight = torch.ones(576, dtype=ceilings.dtype)
        norm = routes.route(add_rms_norm, {"dtype": ceilings.dtype, "width": 576})
        named(add_rms_norm, tokens, lambda: norm(x, x.clone(), weight, 1e-5), 5.0 * x.nbytes)  # noqa: B023
        gate = torch.randn(tokens, 3072).to(ceilings.dtype)
        gated = routes.route(silu_mul, {"dtype": ceilings.dtype, "width": 1536})
        named(silu_mul, tokens, lambda: gated(gate), 1.5 * gate.nbytes)  # noqa: B023
    need = {"dtype": torch.float32, "vocab_size": 49152}
    for rows in (1, 32):
        logits = torch.randn(rows, 49152) * 4
        choose, pick = routes.route(greedy, need), routes.route(draw, need)
        named(greedy, rows, lambda: choose(logits), logits.nbytes)  # noqa: B023
        ones, seeds = torch.ones(rows), torch.arange(rows)
        for what, top_p, top_k, width in (
            ("plain", 1.0, 49152, 0),
            ("top-p 0.9", 0.9, 49152, 49152),
            ("top-k 50", 1.0, 50, 50),
        ):
            arguments = (ones, torch.full((rows,), top_k), ones * top_p, ones * 0, seeds, seeds)
            seconds = best_of(lambda: pick(logits, *arguments, width))  # noqa: B023
            ceilings.line(
                f"draw, {what}, {rows} rows ({pick.current.name})", seconds, logits.nbytes, 0
            )


def plan_of(starts: list[int], counts: list[int], admitted: bool) -> StepPlan:
    """Rows in slots 0, 1, ..., 16 pages of 16 tokens each."""
    rows = len(starts)
    slots, columns = np.repeat(np.arange(rows), 16), np.tile(np.arange(16), rows)
    params = SamplingParams(temperature=0.0)
    known = np.full(128, 100, np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        tokens=np.random.default_rng(0).integers(100, 40_000, sum(counts)).astype(np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_logprobs=np.full(rows, -1, np.int32),
        table_slots=slots.astype(np.int32),
        table_columns=columns.astype(np.int32),
        table_pages=(1 + np.arange(rows * 16)).astype(np.int32),
        admitted=tuple(Admitted(row, params, 128, known) for row in range(rows))
        if admitted
        else (),
    )


def steps(worker: Worker, ceilings: Ceilings) -> None:
    """Decodes with 128 to 255 tokens behind them, and prompts of 128."""
    kv = worker.geometry.kv_bytes_per_token
    vocab = worker.geometry.vocab_size
    sizes = [
        (parameter.shape[0] == vocab, parameter.numel) for parameter in worker.built.site.parameters
    ]
    head = max(size for of_vocab, size in sizes if of_vocab)
    layers = sum(size for of_vocab, size in sizes if not of_vocab)

    def run(plan: StepPlan) -> None:
        worker.runner.run(plan).wait()

    for rows in (1, 2, 4, 8, 16, 32):
        run(plan_of([0] * rows, [128] * rows, admitted=True))
        plan = plan_of([190] * rows, [1] * rows, admitted=False)
        seconds = best_of(lambda: run(plan), 2.0)  # noqa: B023
        moved = worker.built.weight_bytes + rows * 190 * kv
        ceilings.line(
            f"decode of {rows}: {rows / seconds:.0f} tokens/s",
            seconds,
            moved,
            2.0 * (layers + head) * rows,
        )
    for rows in (1, 4, 16):
        plan = plan_of([0] * rows, [128] * rows, admitted=True)
        seconds = best_of(lambda: run(plan), 2.0)  # noqa: B023
        flops = 2.0 * (layers * 128 + head) * rows
        ceilings.line(
            f"prefill of {128 * rows}: {128 * rows / seconds:.0f} tokens/s",
            seconds,
            worker.built.weight_bytes,
            flops,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="also time whole steps of this model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native.set_threads(options.threads)
    ceilings = Ceilings(options.threads, DTYPES[options.dtype])
    routes = Routes(probe("cpu"), {}, strict=False)
    if not options.steps_only:
        products(routes, ceilings)
        attentions(routes, ceilings)
        small(routes, ceilings)
    if options.model:
        settings = WorkerSettings(
            options.model,
            device="cpu",
            dtype=options.dtype,
            max_slots=64,
            max_total_tokens=16_384,
            threads=options.threads,
        )
        steps(start_worker(settings), ceilings)


if __name__ == "__main__":
    main()
