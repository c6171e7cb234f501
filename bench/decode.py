"""Time decode steps of a dense model with dummy weights on a GPU, with CUDA graphs and without.

    python bench/decode.py [--batch 1,8,64,256] [--context 1024] [--eager] [--sampled] [--profile]

Plans are made as the engine's loop makes them, two steps out at a time, tokens unknown to the host.
A step is the wall clock of many over their number; "replay" is the graph alone, by device events.
The bound is the bytes that must be read: every weight but the embedding's, and the batch's KV, at
4.3 TB/s (an H200's measured ceiling). The KV cache holds random numbers.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from detour.engine.plan import UNKNOWN_TOKEN, Admitted, StepPlan
from detour.sampling_params import SamplingParams
from detour.worker.capacity import Worker, start_worker
from detour.worker.settings import WorkerSettings

TERABYTES = 4.3e12
PAGE = 16
LLAMA_8B = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}


def start(model: Path, sizes: tuple[int, ...], slots: int, context: int) -> Worker:
    worker = start_worker(
        WorkerSettings(
            model, device="cuda", load_format="dummy", page_size=PAGE, max_slots=slots,
            max_step_tokens=2048, max_total_tokens=slots * context, memory_fraction=0.9,
            graph_sizes=sizes,
        )
    )  # fmt: skip
    with torch.inference_mode():
        for layer in worker.runner.kv.layers:
            for tensor in layer:
                tensor.normal_()
    return worker


def plan(step: int, rows: int, position: int, params: SamplingParams | None) -> StepPlan:
    """A step of `rows` decodes at `position`; with params the sequences enter, and get pages."""
    none = np.zeros(0, np.int32)
    tables: tuple[np.ndarray, ...] = (none, none, none)
    admitted: tuple[Admitted, ...] = ()
    if params is not None:
        columns = position // PAGE + 64
        pages = 1 + np.random.default_rng(0).permutation(rows * columns).astype(np.int32)
        slots, places = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
        tables = (slots.astype(np.int32), places.astype(np.int32), pages)
        known = np.ones(position, np.int32)
        admitted = tuple(Admitted(row, params, position, known) for row in range(rows))
    return StepPlan(
        step, np.arange(rows, dtype=np.int32), np.full(rows, position, np.int32),
        np.ones(rows, np.int32), np.full(rows, 5 if admitted else UNKNOWN_TOKEN, np.int32),
        np.ones(rows, np.bool_), np.full(rows, -1, np.int32), *tables, admitted,
    )  # fmt: skip


def steps(worker: Worker, rows: int, context: int, count: int, params: SamplingParams) -> float:
    """Milliseconds a step, two out at a time."""
    runner = worker.runner
    out = [runner.run(plan(0, rows, context, params))]
    begun = 0.0
    for step in range(1, count + 6):
        if step == 6:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        out.append(runner.run(plan(step, rows, context + step, None)))
        result = out.pop(0).wait()
        assert result.finite.all()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / count


def replay(worker: Worker, rows: int) -> float:
    """Milliseconds of the graph alone, replayed with what the last step left."""
    graphs = worker.runner.graphs.captured
    one = graphs[min(key for key in graphs if key[0] >= rows)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    one.replay()
    begin.record()
    for _ in range(10):
        one.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 10


def profile(worker: Worker, rows: int, context: int, params: SamplingParams) -> str:
    """Kernels of a step by time: microseconds a step and launches a step."""
    runner, number = worker.runner, 3
    runner.run(plan(0, rows, context, params)).wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for step in range(number):
            runner.run(plan(1 + step, rows, context + 1 + step, None)).wait()
        torch.cuda.synchronize()
    lines = sorted(found.key_averages(), key=lambda one: -one.device_time_total)
    return "\n".join(
        f"    {one.device_time_total / number:9.1f} us {one.count / number:6.1f} x  {one.key[:90]}"
        for one in lines[:16]
    )


def bound(worker: Worker, rows: int, context: int) -> float:
    """Milliseconds that the bytes of a step take."""
    weights = worker.built.weight_bytes - 2 * LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]  # type: ignore[operator]
    return 1e3 * (weights + rows * context * worker.geometry.kv_bytes_per_token) / TERABYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--eager", action="store_true", help="without graphs alone")
    parser.add_argument("--sampled", action="store_true", help="with temperature and top-p too")
    parser.add_argument("--profile", default="", help="batches to show kernel by kernel")
    options = parser.parse_args()
    batches = [int(word) for word in options.batch.split(",")]
    kinds = {"greedy": SamplingParams(temperature=0.0, max_tokens=4096)}
    if options.sampled:
        kinds["top-p"] = SamplingParams(top_p=0.95, seed=3, max_tokens=4096)
        kinds["plain"] = SamplingParams(seed=3, max_tokens=4096)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        begun = time.perf_counter()
        sizes = () if options.eager else tuple(batches)
        worker = start(Path(folder), sizes, max(batches), options.context + 1024)
        print(f"started in {time.perf_counter() - begun:.1f} s, graphs {sizes}", flush=True)
    graphs = worker.runner.graphs.captured
    for rows in batches:
        least = bound(worker, rows, options.context)
        for name, params in kinds.items():
            said = f"{rows:4} x {options.context} {name:7}"
            took = steps(worker, rows, options.context, options.count, params)
            said += f" {took:7.3f} ms, bound {least:.2f} = {100 * least / took:.0f} %"
            if graphs and name == "greedy":
                alone = replay(worker, rows)
                kept, worker.runner.graphs.captured = graphs, {}
                eager = steps(worker, rows, options.context, 10, params)
                worker.runner.graphs.captured = kept
                said += f"; replay {alone:.3f}; eager {eager:.3f}"
            print(said, flush=True)
    for word in options.profile.split(",") if options.profile else ():
        print(f"  {word} rows, greedy:", flush=True)
        print(profile(worker, int(word), options.context, kinds["greedy"]), flush=True)


if __name__ == "__main__":
    main()
