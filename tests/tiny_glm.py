"""Tiny models of GLM's and DeepSeek's architectures for tests: sparse beyond sixteen tokens."""

from pathlib import Path
from typing import Any

import torch

from detour.loading.synthetic import write_checkpoint
from detour.models import tensor_shapes

TOP_K = 16  # cached tokens that a token attends to
MIXTURE = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
FRAME = {
    **MIXTURE,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LATENT = {
    **FRAME,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 32,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
SPARSE = {**LATENT, "index_n_heads": 16, "index_head_dim": 32, "index_topk": TOP_K}
MODELS: dict[str, dict[str, Any]] = {
    "glm5": {**SPARSE, "model_type": "glm_moe_dsa", "indexer_rope_interleave": True},
    "glm52": {
        **SPARSE,
        "model_type": "glm_moe_dsa",
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "deepseek_v32": {**SPARSE, "model_type": "deepseek_v32"},
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3"},
    "glm4_moe": {
        **FRAME,
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
}


def write_tiny_glm(
    folder: Path, name: str = "glm5", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A random checkpoint of MODELS[name] with `changes`, in `folder`."""
    config = {**MODELS[name], **changes}
    return write_checkpoint(folder, config, tensor_shapes(config), seed=3, dtype=dtype)
