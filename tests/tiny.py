"""Tiny models for tests: a configuration, and checkpoints made of it."""

from pathlib import Path

from detour.loading.synthetic import write_checkpoint
from detour.models import tensor_shapes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_tiny(folder: Path, **changes) -> Path:
    """A checkpoint of CONFIG with `changes`, in `folder`."""
    config = {**CONFIG, **changes}
    return write_checkpoint(folder, config, tensor_shapes(config))
