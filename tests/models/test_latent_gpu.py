"""Latent and sparse attention on a GPU against the CPU, cached in every way, with and without graphs."""

import pytest
import torch
from step_driver import Driver, make_runner
from tiny_glm import MODELS, write_tiny_glm

pytestmark = pytest.mark.gpu

STEPS = ([(0, 40), (1, 9)], [(0, 30), (1, 1)], [(1, 1), (0, 1)], [(1, 45), (0, 1), (2, 17)])


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(8, 300, (length,), generator=source).tolist()


def logits(folder, device: str, **changes) -> torch.Tensor:
    driver = Driver(make_runner(folder, device=device, **changes))
    for slot, length in ((0, 72), (1, 56), (2, 17)):
        driver.admit(slot, prompt(slot, length))
    return torch.cat([part for rows in STEPS for part in driver.logits(rows)])


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_cpu(name, kv, tmp_path):
    folder = write_tiny_glm(tmp_path, name)
    wanted, got = (logits(folder, device, kv_dtype=kv) for device in ("cpu", "cuda"))
    tolerance = 1e-4 if kv == "float32" else 5e-3
    assert (got - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["glm52", "deepseek_v3"])
def test_bfloat16_stays_near_float32(name, kv, tmp_path):
    """As it is served: in the mean, since a selection that turns out otherwise changes a token."""
    folder = write_tiny_glm(tmp_path, name, kv_lora_rank=128, qk_rope_head_dim=64, qk_head_dim=88,
                            index_head_dim=128)  # fmt: skip
    wanted = logits(folder, "cpu", kv_dtype="float32")
    got = logits(folder, "cuda", dtype="bfloat16", kv_dtype=kv)
    assert (got - wanted).norm() < 0.6 * wanted.norm()


@pytest.mark.parametrize("name", ["glm52", "deepseek_v3"])
def test_graphs_do_not_change_the_answer(name, tmp_path):
    """In float32: a graph always selects, steps outside of it only where there is something to."""
    folder = write_tiny_glm(tmp_path, name, first_k_dense_replace=4)  # experts count on the host
    answers = []
    for sizes in ((), (1, 4)):
        driver = Driver(make_runner(folder, device="cuda", graph_sizes=sizes))
        assert bool(driver.runner.graphs.captured) == bool(sizes)
        for slot, length in ((0, 5), (1, 30), (2, 14)):
            driver.admit(slot, prompt(slot, length))
        driver.run([(0, 5), (1, 30), (2, 14)])
        for _ in range(40):
            driver.run([(0, 1), (1, 1), (2, 1)])
        answers.append([driver.sequences[slot].known for slot in range(3)])
    assert answers[0] == answers[1]
