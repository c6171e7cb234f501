"""Item 13 of the host path: what the sampler does on the host per step for 1,024 mixed requests."""

import time

import numpy as np
import torch
from row import Row

from detour.engine.plan import Admitted, StepPlan
from detour.sampling_params import SamplingParams
from detour.worker.sampler import Sampler

REQUESTS = 1024
VOCAB = 49_152
REPEATS = 300


def mixed(number: int) -> SamplingParams:
    """Eight kinds of request: greedy, filters, penalties, biases, min_tokens, log-probabilities."""
    kinds: tuple[dict[str, object], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40, "min_p": 0.05},
        {"temperature": 1.0, "logit_bias": {number + 7 * at: 1.5 for at in range(20)}},
        {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": (5, 6, 7)},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    )
    return SamplingParams(seed=number, max_tokens=100, **kinds[number % len(kinds)])


def decode_plan() -> StepPlan:
    ones, empty = np.ones(REQUESTS, dtype=np.int32), np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(REQUESTS, dtype=np.int32),
        starts=ones * 1024,
        counts=ones,
        tokens=-ones,
        samples=np.ones(REQUESTS, dtype=bool),
        prompt_logprobs=-ones,
        table_slots=empty,
        table_columns=empty,
        table_pages=empty,
    )


def rows() -> list[Row]:
    """CPU time on one thread, medians."""
    torch.set_num_threads(1)
    sampler = Sampler(REQUESTS, VOCAB, torch.device("cpu"), (0, 2))
    known = np.arange(1024, dtype=np.int32)
    sequences = [Admitted(slot, mixed(slot), 1020, known) for slot in range(REQUESTS)]
    started = time.process_time()
    sampler.admit(sequences)
    admission = (time.process_time() - started) / REQUESTS
    plan = decode_plan()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        sampler.prepare(plan)
        times.append(time.process_time() - started)
    step = float(np.median(times))
    return [
        Row(
            "13 sampling bookkeeping, 1,024 mixed requests",
            step * 1e3,
            "ms",
            "0.21, mini-sglang",
            0.3,
        ),
        Row("13 sampling bookkeeping, admission of one", admission * 1e6, "us", "", 100.0),
    ]


if __name__ == "__main__":
    for row in rows():
        print(row)
