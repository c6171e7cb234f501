"""Every architecture against transformers on tiny random checkpoints, float32.

A failure of `whole` alone is a layer's math; of the others alone, staging, paging or attention.
"""

import pytest
import torch
from oracles import LATENT, SIGMOID_MOE, SPARSE, expected, greedy, prompt, rope, write_oracle
from step_driver import Driver, make_runner

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


CASES = {
    "llama": ("llama", {}),
    "llama-mha-biased-tied": (
        "llama",
        {
            "num_key_value_heads": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear": ("llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "llama-yarn": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-yarn-mscale": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=24,
            beta_slow=2,
            truncate=False,
        ),
    ),
    "llama-yarn-factor": (
        "llama",
        rope("yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=0.8),
    ),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 96, "tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "glm4_moe": ("glm4_moe", {**SIGMOID_MOE, "attention_bias": True}),
    "glm4_moe-normed-grouped": (
        "glm4_moe",
        {**SIGMOID_MOE, "use_qk_norm": True, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-half-split-biased": (
        "deepseek_v3",
        {**LATENT, "rope_interleave": False, "attention_bias": True, "q_lora_rank": None},
    ),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            **LATENT,
            "norm_topk_prob": False,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "deepseek_v32": ("deepseek_v32", {**SPARSE, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE),
    "glm_moe_dsa-dense": ("glm_moe_dsa", {**SPARSE, "index_topk": 256}),
    "glm_moe_dsa-shared": (
        "glm_moe_dsa",
        {**SPARSE, "num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 2},
    ),
    "glm_moe_dsa-pattern": ("glm_moe_dsa", {**SPARSE, "index_topk_pattern": "FSF"}),
}


# Products of float32 on a GPU may run in TF32, which has a mantissa of ten bits.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def oracle(request, tmp_path_factory):
    """A transformers model with random weights, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_oracle(*CASES[request.param], folder), folder


def close(got: torch.Tensor, wanted: torch.Tensor, device: str) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < TOLERANCE[device] * wanted.abs().max()


def test_whole_prompt(oracle, device):
    model, folder = oracle
    ids = prompt(1, 200)
    driver = Driver(make_runner(folder, device=device))
    driver.admit(0, ids)
    close(driver.logits([(0, 200)])[0], expected(model, ids), device)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_prefixes_and_decodes_in_mixed_steps(oracle, device, page_size):
    """Slot 0 in chunks of 64, slot 1 in uneven ones, slot 2 on pages of slot 0, slot 3 decoding."""
    model, folder = oracle
    ids = {0: prompt(1, 150), 1: prompt(2, 90), 3: prompt(4, 75)}
    ids[2] = ids[0][:128] + prompt(3, 40)
    driver = Driver(make_runner(folder, device=device, page_size=page_size))
    for slot in (0, 1, 3):
        driver.admit(slot, ids[slot])
    got: dict[int, list[torch.Tensor]] = {slot: [] for slot in ids}
    steps = [
        [(0, 64), (3, 70)],
        [(3, 1), (0, 64), (1, 7)],
        [(1, 33), (3, 1), (0, 20)],
        [(2, 17), (1, 1), (3, 1), (0, 1)],
        [(0, 1), (2, 1), (1, 49), (3, 1)],
        [(2, 22), (3, 1)],
    ]
    for number, rows in enumerate(steps):
        if number == 3:
            driver.admit(2, ids[2], like=0, shared=128)
        for (slot, _), logits in zip(rows, driver.logits(rows), strict=True):
            got[slot].append(logits)
    for slot, parts in got.items():
        stop = driver.sequences[slot].computed
        wanted = expected(model, ids[slot][:stop])
        close(torch.cat(parts), wanted[128:] if slot == 2 else wanted, device)


def test_greedy_tokens(oracle, device):
    """Thirty tokens beside another sequence, each decode planned before its input came back."""
    model, folder = oracle
    ids = prompt(5, 37)
    wanted = greedy(model, ids, 30)
    driver = Driver(make_runner(folder, device=device, page_size=4))
    driver.admit(5, ids)
    driver.admit(1, prompt(6, 9))
    last = driver.runner.run(driver.plan([(5, 37), (1, 9)]))
    for _ in range(29):
        following = driver.runner.run(driver.plan([(1, 1), (5, 1)], unknown=True))
        driver.commit(last.wait())
        last = following
    driver.commit(last.wait())
    assert driver.sequences[5].known[37:] == wanted
