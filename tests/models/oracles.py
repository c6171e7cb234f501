"""transformers' models with random weights, saved as checkpoints, and what they say."""

from pathlib import Path
from typing import Any

import torch
import transformers

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
SIGMOID_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **SIGMOID_MOE,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
# Fewer index heads would leave many scores at exactly 0, tied, where transformers picks any.
SPARSE = {**LATENT, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 16}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


@torch.no_grad()
def write_oracle(model_type: str, changes: dict[str, Any], folder: Path) -> Any:
    """The float32 model of TINY with `changes` (None takes a field away), saved to `folder`."""
    values = {name: value for name, value in {**TINY, **changes}.items() if value is not None}
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif not name.endswith("inv_freq"):
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(1.5 * scale * torch.randn_like(parameter))
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps  # see models/glm_moe_dsa.py
    model.save_pretrained(folder)
    return model


def prompt(seed: int, length: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY["vocab_size"], (length,), generator=source).tolist()


@torch.inference_mode()
def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]"""
    return model(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The `count` tokens that follow."""
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return found[0, len(ids) :].tolist()
