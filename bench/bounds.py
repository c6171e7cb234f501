"""What this machine allows: memory bandwidth and arithmetic, and the step times that follow.

    python bench/bounds.py [--parameters 134.5e6] [--threads 1,2]

A decode step reads every weight once and does two operations a weight and sequence, so it takes at
least max(weight bytes / bandwidth, 2 x parameters x sequences / peak). Run it on a quiet machine.
"""

import argparse
import time
from collections.abc import Callable

import torch

FORMATS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625}  # bytes a weight; int8 with scales


def best(call: Callable[[], object], seconds: float = 1.5) -> float:
    """The shortest run of `call` in about `seconds`."""
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--parameters", type=float, default=134.5e6)
    parser.add_argument("--threads", default="1,2")
    args = parser.parse_args()
    block = torch.ones(64 * 2**20)  # 256 MB: far more than any cache
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a16, b16 = a.bfloat16(), b.bfloat16()
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        bandwidth = block.nbytes / best(lambda: block.sum())
        peak = 2 * 1024**3 / best(lambda: a @ b)
        peak16 = 2 * 1024**3 / best(lambda: a16 @ b16)
        print(
            f"{threads} threads: reads {bandwidth / 1e9:.1f} GB/s, float32 {peak / 1e9:.0f}, "
            f"bfloat16 {peak16 / 1e9:.0f} GFLOP/s"
        )
        for name, width in FORMATS.items():
            weights = args.parameters * width / bandwidth
            rate = max(peak, peak16) if name == "bfloat16" else peak
            cells = []
            for sequences in (1, 8, 32):
                step = max(weights, 2 * args.parameters * sequences / rate)
                bound = "bytes" if step == weights else "FLOPs"
                tokens = f"{step * 1e3:.1f} ms, {sequences / step:.0f} tok/s"
                cells.append(f"{sequences}: {tokens} ({bound})")
            print(f"  {name:9} weights; sequences " + ";  ".join(cells))


if __name__ == "__main__":
    main()
