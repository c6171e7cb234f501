"""How much would fit on a device: capacity.py's account, forecast instead of measured."""

from dataclasses import dataclass

import torch

from detour.layers.experts import ExpertWeights
from detour.layers.weight import Matrix
from detour.worker.chips import Chip
from detour.worker.kv_cache import CPU_MOST, available_memory
from detour.worker.outline import Outline
from detour.worker.settings import WorkerSettings


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank, and what of it a KV cache makes."""

    memory: int  # that the device has
    share: float  # of it that may be taken
    scores: int  # of the indexer, for a step of long sequences
    activations: int  # of the largest step: an estimate
    kv: int  # what is left for KV, or as much as is wanted; may be negative
    tokens: int  # that it holds
    pages: int
    context: int  # tokens of a sequence
    sequences: int  # that may run at once, by the flags

    def fit(self, tokens: float) -> int:
        """Sequences of so many tokens each that the cache holds."""
        return int(self.tokens // max(tokens, 1))


def forecast(settings: WorkerSettings, model: Outline, chip: Chip | None) -> Forecast:
    """chip: None = this machine's own device."""
    context = settings.context_length or model.model.longest_context
    scores = model.model.transient_bytes(settings.max_step_tokens, context)
    activations = step_bytes(model, settings) if model.device.is_cuda else 0
    memory = _memory(model, chip)
    if model.device.is_cuda:
        kv = int(memory * settings.memory_fraction) - model.weight_bytes - activations
    else:
        kv = int((memory - model.weight_bytes) * settings.memory_fraction)
        kv = kv if settings.max_total_tokens else min(kv, CPU_MOST)
    kv -= scores
    cost = model.kv_bytes_per_token
    wanted = settings.max_total_tokens or settings.max_slots * context
    page = settings.page_size
    pages = max(0, min(kv // (cost * page), -(-wanted // page) + 1))
    return Forecast(
        memory=memory,
        share=settings.memory_fraction,
        scores=scores,
        activations=activations,
        kv=kv,
        tokens=max(0, pages - 1) * page,
        pages=pages,
        context=context,
        sequences=settings.max_slots,
    )


def step_bytes(model: Outline, settings: WorkerSettings) -> int:
    """Activations that are held at one time in the largest step, about."""
    config, wide = model.config, model.dtype.itemsize
    matrices = [w.parameter for w in model.weights if isinstance(w.parameter, Matrix)]
    own = [matrix for matrix in matrices if matrix.shape[0] < model.model.vocab_size // model.ranks]
    numbers = 4 * config["hidden_size"] + 2 * max((m.shape[0] for m in own), default=0)
    rank = config.get("kv_lora_rank") or 0
    numbers += 2 * rank * max(1, config["num_attention_heads"] // model.ranks)
    experts = [w.parameter for w in model.weights if isinstance(w.parameter, ExpertWeights)]
    if experts:
        _, hidden, width = experts[0].sizes
        numbers += config["num_experts_per_tok"] * (3 * width + hidden)
    logits = 3 * 4 * settings.max_slots * model.model.vocab_size
    return settings.max_step_tokens * numbers * wide + logits


def _memory(model: Outline, chip: Chip | None) -> int:
    if chip is not None:
        return chip.memory
    if model.device.is_cuda:
        total: int = torch.cuda.mem_get_info(model.device.torch_device)[1]
        return total
    return available_memory()
