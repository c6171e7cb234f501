"""Time every op x backend x shape on a GPU: us, GB/s, TFLOP/s and the share of the bound.

    python bench/kernels.py [--only REGEX] [--variants] [--json FILE]

Each case is captured in a CUDA graph over several sets of inputs that together exceed the L2 cache,
and replayed; the figure is the median over replays, divided by the sets. The bound is the larger of
bytes / 4.3 TB/s and operations / 788 TFLOP/s (ceilings measured on an H200): bytes that must move
once, operations on real rows. Routing is uniform; a case's label carries the experts it covers.
"""

import argparse
import json
import re
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from kernel_case import Case
from kernel_cases import cases

TERABYTES = 4.3e12
TERAFLOPS = 788e12


@dataclass(frozen=True)
class Timed:
    op: str
    backend: str
    shape: str
    us: float
    gigabytes_a_second: float
    teraflops: float
    percent_of_bound: float
    spread_percent: float  # between the 10th and 90th percentile of replays


def time_graph(calls: list[Callable[[], object]], budget_ms: float) -> tuple[float, float]:
    """(median us a call, spread in percent): one graph over all calls, replayed."""
    while len(calls) < 16 and quick(calls):
        calls = calls * 2  # a graph of one small kernel would time the replay itself
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for number in range(400):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
        if number >= 12 and sum(times) * len(calls) > budget_ms * 1e3:
            break
    times.sort()
    middle = statistics.median(times)
    return middle, 100 * (times[len(times) * 9 // 10] - times[len(times) // 10]) / middle


def quick(calls: list[Callable[[], object]]) -> bool:
    """Whether all calls together take less than 300 us (the first round compiles)."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
    return start.elapsed_time(stop) < 0.3


def breakdown(case: Case) -> str:
    """Where a call's time goes, kernel by kernel, from the profiler."""
    calls = case.make()
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            for call in calls:
                call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    total = 5 * len(calls)
    parts = [f"{row.key[:40]} {row.device_time_total / total:.1f}" for row in rows[:6]]
    return f"{case.op} {case.backend} {case.shape}: " + ", ".join(parts)


def run(case: Case, budget_ms: float) -> Timed:
    us, spread = time_graph(case.make(), budget_ms)
    bound = max(case.bytes / TERABYTES, case.operations / TERAFLOPS) * 1e6
    return Timed(
        case.op,
        case.backend,
        case.shape,
        us,
        case.bytes / us / 1e3,
        case.operations / us / 1e6,
        100 * bound / us,
        spread,
    )


def table(results: list[Timed]) -> Iterator[str]:
    yield f"{'op':<14}{'backend':<22}{'shape':<34}{'us':>9}{'GB/s':>7}{'TF/s':>7}{'% bnd':>7}{'+-%':>5}"
    for r in results:
        yield (
            f"{r.op:<14}{r.backend:<22}{r.shape:<34}{r.us:>9.1f}{r.gigabytes_a_second:>7.0f}"
            f"{r.teraflops:>7.1f}{r.percent_of_bound:>7.1f}{r.spread_percent:>5.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression on 'op backend shape'")
    parser.add_argument(
        "--variants", action="store_true", help="tile shapes beside the chosen ones"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="replay time a case")
    parser.add_argument(
        "--warm", default="", help="I/N: run part I of N once, to fill the compile cache"
    )
    parser.add_argument("--breakdown", action="store_true", help="kernel by kernel, from a profile")
    options = parser.parse_args()
    wanted = [
        case
        for case in cases(options.variants)
        if re.search(options.only, f"{case.op} {case.backend} {case.shape}")
    ]
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        wanted = wanted[part::parts]
    if options.breakdown:
        print("\n".join(breakdown(case) for case in wanted))
        return
    results: list[Timed] = []
    failed: list[str] = []
    for case in wanted:
        name = f"{case.op} {case.backend} {case.shape}"
        try:
            if options.warm:
                case.make()[0]()
                torch.cuda.synchronize()
            else:
                results.append(run(case, options.budget_ms))
        except Exception as error:  # one case that cannot run must not cost the others
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            if not options.warm:
                traceback.print_exc()
            if "CUDA error" in str(error):
                break
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    if not options.warm:
        print("\n".join(table(results)))
    print("\n".join(f"FAILED {line}" for line in failed))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
