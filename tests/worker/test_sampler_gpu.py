"""The sampler on a GPU: the same tokens as on a CPU, and never a wait for the device."""

import numpy as np
import pytest
import torch

from detour.engine.plan import Admitted, StepPlan
from detour.ops.sampling import draw, greedy
from detour.ops.sampling.noise import row_keys, token_numbers
from detour.sampling_params import SamplingParams
from detour.worker.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

VOCAB, ROWS = 5000, 24
KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 30.0}, "min_tokens": 4, "max_tokens": 9},
)


def test_noise_has_the_same_bits_on_both():
    seeds = torch.tensor([0, 1, 2**63 - 1])
    positions = torch.tensor([0, 77, 2**31 - 1])
    tokens = torch.arange(160_000, dtype=torch.int32)
    here = token_numbers(row_keys(seeds, positions), tokens)
    there = token_numbers(row_keys(seeds.cuda(), positions.cuda()), tokens.cuda())
    assert torch.equal(here, there.cpu())


def sampled(device: torch.device, steps: int, backend: str) -> list[list[int]]:
    ways = [op.discover()[backend].run for op in (draw, greedy)]
    sampler = Sampler(ROWS, VOCAB, device, (0, 2), *ways)
    sampler.admit(
        [
            Admitted(
                row,
                SamplingParams(seed=row, **KINDS[row % len(KINDS)]),
                3,
                np.arange(1, 4, dtype=np.int32),
            )
            for row in range(ROWS)
        ]
    )
    ones, empty = np.ones(ROWS, np.int32), np.zeros(0, np.int32)
    tokens, found = torch.full((ROWS,), 3, device=device), []
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        logits = (torch.randn(ROWS, VOCAB, generator=source) * 3).to(device)
        plan = StepPlan(
            step, np.arange(ROWS, dtype=np.int32), ones * (2 + step), ones, -ones, ones > 0, -ones,
            empty, empty, empty,
        )  # fmt: skip
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if step else before)
        try:
            out = sampler.sample(logits, sampler.prepare(plan), tokens)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        tokens = out.tokens
        found.append(tokens.tolist())
        assert bool(out.finite.all())
    return found


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_same_tokens_without_waiting(backend: str):
    there = sampled(torch.device("cuda"), 6, backend)
    assert there == sampled(torch.device("cpu"), 6, "reference")
