"""Every architecture against transformers on tiny random checkpoints, float32.

A failure of `whole` alone is a layer's math; of the others alone, staging, paging or attention.
"""

import pytest
import torch
import transformers
from step_driver import Driver, make_runner

# Small, but no two sizes alike, so that a swapped dimension cannot hide.
TINY = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def rope(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


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
}


# Products of float32 on a GPU may run in TF32, which has a mantissa of ten bits.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def oracle(request, tmp_path_factory):
    """A transformers model with random weights, and the folder it was saved to."""
    model_type, changes = CASES[request.param]
    values = {name: value for name, value in {**TINY, **changes}.items() if value is not None}
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                parameter.copy_(1.5 * scale * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY["vocab_size"], (length,), generator=source).tolist()


@torch.inference_mode()
def expected(model, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]"""
    return model(torch.tensor([ids])).logits[0]


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
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=30,
            min_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
        )[0, len(ids) :].tolist()
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
