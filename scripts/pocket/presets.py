"""What is trained: sizes of the model and of the training, one preset for a CPU, one for a GPU."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    rooms: lengths of conversations in tokens, from the first on to the last.
    batch: tokens a step.
    shares: of the time, for dense attention and for distilling; the rest is for sparse attention.
    """

    config: dict[str, Any]
    rooms: tuple[int, ...]
    batch: int
    muon_rate: float = 0.02
    adam_rate: float = 1e-3
    shares: tuple[float, float] = (0.75, 0.1)


def config(
    hidden: int, layers: int, heads: int, mixture: tuple[int, int], sparse: tuple[int, int]
) -> dict[str, Any]:
    """A configuration as GLM-5's. mixture: experts and their width. sparse: top-k, context."""
    experts, width = mixture
    top_k, context = sparse
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 96,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 48,
        "v_head_dim": 32,
        "head_dim": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": top_k,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_theta": 2 * context, "rope_type": "default"},
        "vocab_size": 1280,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "eos_token_id": [0, 4, 6],
        "pad_token_id": 0,
    }


PRESETS = {
    # 2.0 M parameters, 4 MB
    "cpu": Preset(config(128, 4, 8, (8, 64), (64, 256)), (64, 128, 240), 2048),
    # 2.4 M parameters, 5 MB
    "gpu": Preset(config(128, 5, 8, (8, 64), (128, 1024)), (64, 128, 256, 512, 1000), 65536),
}
