"""One rank's step: stage, forward, logits, sample, result.

Knows no files and no processes. Running a plan twice writes the same KV and gives the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detour.engine.plan import PromptRowLogprobs, StepPlan, StepResult
from detour.models.model import Model
from detour.worker.cuda_graphs import DecodeGraphs, Forward
from detour.worker.kv_cache import KVCache
from detour.worker.sampler import Sampled, Sampler, token_logprobs
from detour.worker.staging import Staging

# Prompt log-probabilities are taken from so many bytes of float32 logits at a time.
LOGIT_BYTES = 256 << 20


@dataclass(frozen=True)
class PromptTensors:
    """A PromptRowLogprobs still on the device."""

    slot: int
    start: int
    logprobs: Tensor  # [n]
    top_ids: Tensor  # [n, k]
    top_logprobs: Tensor  # [n, k]


@dataclass(frozen=True)
class Pending:
    """A step that was started. `wait` gives its result, waiting for the device."""

    plan: StepPlan
    sampled: Sampled
    prompts: tuple[PromptTensors, ...]
    arrived: Callable[[], None]  # returns once the tensors, which lie on the host, are filled

    def wait(self) -> StepResult:
        self.arrived()
        sampled = self.sampled
        return StepResult(
            step=self.plan.step,
            slots=self.plan.slots[self.plan.samples],
            tokens=_ids(sampled.tokens),
            logprobs=sampled.logprobs.numpy(),
            top_ids=_ids(sampled.top_ids),
            top_logprobs=sampled.top_logprobs.numpy(),
            finite=sampled.finite.numpy(),
            prompt_logprobs=tuple(
                PromptRowLogprobs(
                    row.slot,
                    row.start,
                    row.logprobs.numpy(),
                    _ids(row.top_ids),
                    row.top_logprobs.numpy(),
                )
                for row in self.prompts
            ),
        )


def _ids(tensor: Tensor) -> NDArray[np.int32]:
    return tensor.numpy().astype(np.int32)


class Runner:
    """A model, its KV cache and its sampler. `run` never waits for the device."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        sampler: Sampler,
        staging: Staging,
        device: torch.device,
        logit_bytes: int = LOGIT_BYTES,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.staging = staging
        self.device = device
        self.logit_bytes = logit_bytes
        self.graphs = DecodeGraphs(model, kv, staging)
        self.prompts: dict[int, NDArray[np.int32]] = {}  # slot -> prompt, of those that ask

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Pending:
        """Start a step. Raises what a backend raises."""
        self.sampler.admit(plan.admitted)
        self._admit(plan)
        sampling = self.sampler.prepare(plan)
        passed = self.graphs.run(plan) or self._forward(plan)
        sampled = self.sampler.sample(self._logits(passed), sampling, passed.tokens)
        self.staging.remember(passed.places, sampled.tokens)
        return self._fetch(plan, sampled, self._prompt_logprobs(plan, passed.hidden))

    def _forward(self, plan: StepPlan) -> Forward:
        batch, places = self.staging.stage(plan)
        hidden = self.model.forward(batch, self.model.plan(batch), self.kv.layers)
        return Forward(hidden, batch.tokens, batch.logits_at, places)

    def _admit(self, plan: StepPlan) -> None:
        for one in plan.admitted:
            self.prompts.pop(one.slot, None)
            if one.params.prompt_logprobs >= 0:
                self.prompts[one.slot] = one.known_ids[: one.prompt_length]

    def _logits(self, passed: Forward) -> Tensor:
        """[sampled rows, V] float32."""
        if not len(passed.logits_at):
            return torch.empty(0, self.model.vocab_size, device=self.device)
        return self.model.logits(passed.hidden.index_select(0, passed.logits_at))

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> tuple[PromptTensors, ...]:
        """For each row that asks: of the prompt tokens that its hidden states foretell.

        A row of tokens [start, start + n) foretells [start + 1, start + n], up to the prompt's end.
        """
        ends = plan.counts.cumsum()
        found = []
        for row in np.flatnonzero(plan.prompt_logprobs >= 0):
            slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.counts[row])
            targets = self.prompts[slot][start + 1 : start + 1 + count]
            first = int(ends[row]) - count
            top = int(plan.prompt_logprobs[row])
            if len(targets):
                tensors = self._foretold(hidden[first : first + len(targets)], targets, top)
                found.append(PromptTensors(slot, start + 1, *tensors))
        return tuple(found)

    def _foretold(
        self, hidden: Tensor, targets: NDArray[np.int32], top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of `targets` and of the `top` best, in chunks that bound the logits."""
        step = max(1, self.logit_bytes // (4 * self.model.vocab_size))
        tokens = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        chunks = [
            token_logprobs(self.model.logits(part), wanted, top)
            for part, wanted in zip(hidden.split(step), tokens.split(step), strict=True)
        ]
        logprobs, top_ids, top_logprobs = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return logprobs, top_ids, top_logprobs

    def _fetch(
        self, plan: StepPlan, sampled: Sampled, prompts: tuple[PromptTensors, ...]
    ) -> Pending:
        """Everything to the host, without waiting."""
        if self.device.type == "cpu":
            return Pending(plan, sampled, prompts, _already)
        there = Sampled(*(_to_host(tensor) for tensor in vars(sampled).values()))
        rows = tuple(
            PromptTensors(
                row.slot,
                row.start,
                _to_host(row.logprobs),
                _to_host(row.top_ids),
                _to_host(row.top_logprobs),
            )
            for row in prompts
        )
        copied = torch.cuda.Event()
        copied.record()
        return Pending(plan, there, rows, copied.synchronize)


def _already() -> None:
    return None


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
