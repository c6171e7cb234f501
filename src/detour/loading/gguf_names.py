"""GGUF tensor names in Hugging Face's words, and where a tensor's rows went.

One GGUF tensor may stand for many: the experts of a layer lie in one.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detour.gguf_header import GgufHeader, GgufTensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_IN_CONFIG = {"rope_freqs.weight"}  # its content became rope_parameters

NO_ORDER: NDArray[np.int64] = np.empty(0, np.int64)


class Placed(NamedTuple):
    """A tensor under its Hugging Face name."""

    header: GgufHeader  # of the file that holds it
    tensor: GgufTensor
    expert: int  # which part of the first dimension; -1 = all of it
    order: NDArray[np.int64]  # our row -> the file's row; empty = the same


def placed_tensors(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Placed]:
    """Every tensor of a file by its Hugging Face name.

    A tensor that has none keeps its GGUF name, so that the model it comes to can refuse it by name.
    """
    found: dict[str, Placed] = {}
    for tensor in header.tensors.values():
        if tensor.name in _IN_CONFIG:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if match and match[2] in _EXPERTS and match[3] == "weight":
            for expert in range(tensor.shape[0]):
                name = f"model.layers.{match[1]}.mlp.experts.{expert}.{_EXPERTS[match[2]]}.weight"
                found[name] = Placed(header, tensor, expert, NO_ORDER)
        else:
            order = _row_order(header, match[2] if match else "", config)
            found[hf_name(tensor.name)] = Placed(header, tensor, -1, order)
    return found


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor that stands for one tensor; unknown names stay."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, ending = name.rpartition(".")
    return f"{_TOP[stem]}.{ending}" if stem in _TOP else name


def _row_order(header: GgufHeader, part: str, config: Mapping[str, Any]) -> NDArray[np.int64]:
    """Undoes what GGUF does to the `llama` architecture's query and key rows.

    Its rope rotates neighbours (0,1), (2,3)…, Hugging Face's the halves (0, d/2)…, so the converter
    interleaves each head's halves. Other architectures keep their rows.
    """
    if header.architecture != "llama" or part not in {"attn_q", "attn_k"}:
        return NO_ORDER
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    rows = np.arange(heads * config["head_dim"], dtype=np.int64)
    return rows.reshape(heads, config["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)
