"""Reads a checkpoint's configuration field by field: with its type, and never guessing.

A model reads every field that changes what it computes and refuses values it does not compute.
Fields that no model here knows are named in one log line.
"""

import logging
from collections.abc import Mapping
from typing import Any

from detour.errors import CheckpointError
from detour.layers.rope import RopeConfig, longest_context, read_rope

log = logging.getLogger(__name__)

# They say nothing about the forward pass of a causal language model in inference.
SILENT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "quantization_config",  # loading/quantization.py
        "compression_config",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "original_max_position_embeddings",
        "tokenizer_class",
        "task_specific_params",
    ]
)


class Fields:
    """One configuration. Every method raises CheckpointError naming the field and its value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.model_type = config.get("model_type")
        self.seen: set[str] = set()

    def _take(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        self.seen.add(name)
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"The {self.model_type} configuration lacks the field {name}.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.refused(name, value, f"expected {kinds[-1].__name__}")
        return value

    def refused(self, name: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(
            f"The {self.model_type} configuration has {name} = {value!r}, which is not supported "
            f"({why})."
        )

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value: int = self._take(name, (int,), default)
        if value < least:
            raise self.refused(name, value, f"at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._take(name, (int, float), default))

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self._take(name, (bool,), default)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self._take(name, (list, tuple), [])
        if not all(isinstance(value, int) for value in values):
            raise self.refused(name, values, "expected a list of numbers")
        return tuple(values)

    def only(self, name: str, *allowed: Any) -> None:
        """Absent, null, or one of `allowed`."""
        self.seen.add(name)
        value = self.config.get(name)
        if value is not None and value not in allowed:
            told = ", ".join(str(one) for one in allowed)
            raise self.refused(name, value, f"supported: {told}" if allowed else "not at all")

    def full_attention(self) -> None:
        """Refuse a sliding window, unless the configuration switches it off."""
        self.seen.add("sliding_window")
        self.only("layer_types", ["full_attention"] * self.integer("num_hidden_layers"))
        window = self.config.get("sliding_window")
        if self.flag("use_sliding_window", default=window is not None) and window:
            raise self.refused("sliding_window", window, "attention is over the whole context")

    def rope(self, head_dim: int) -> tuple[RopeConfig, int]:
        """The rotation, and how many tokens it is made for."""
        self.seen |= {"rope_parameters", "partial_rotary_factor"}
        length = self.integer("max_position_embeddings")
        parameters = self.config.get("rope_parameters")
        if not isinstance(parameters, Mapping) or "rope_type" not in parameters:
            raise self.refused("rope_parameters", parameters, "expected one for all layers")
        rope = read_rope(parameters, head_dim, length)
        return rope, longest_context(rope, length)

    def done(self) -> None:
        """All that the model computes from has been read: refuse or name the rest."""
        unknown = sorted(set(self.config) - self.seen - SILENT)
        if unknown:
            log.warning(
                "The %s configuration has fields that are not read: %s",
                self.model_type,
                ", ".join(unknown),
            )
