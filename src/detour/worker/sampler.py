"""Logits and what each sequence asks for, to tokens and log-probabilities.

Knows slots and StepPlans; knows no model and no text. What a step needs is decided from numbers the
host holds (`prepare`), so that `sample` never waits for the device. Running a step again gives the
same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detour.engine.plan import Admitted, StepPlan
from detour.ops.sampling import draw, greedy
from detour.worker.penalties import PenaltyCounts
from detour.worker.token_bias import TokenBias

Int64s = NDArray[np.int64]

# Below this a temperature is greedy: dividing by it would overflow float32.
GREEDY_BELOW = 1e-5

# What a slot's parameters ask for, as bits.
_RANDOM = 1  # it has a temperature
_ORDERED = 2  # top-k or top-p: its logits must be ordered
_PENALISED = 4
_ASKING = 8  # for log-probabilities
_BIASED = 16
_HELD = 32  # min_tokens: ends are barred at first

# Rows of `floats` and of `integers`.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION = range(4)  # frequency and presence follow repetition
_TOP_K, _SEED, _MAY_END_AT, _LOGPROBS = range(4)

_DRAWN = (_RANDOM, _RANDOM | _ORDERED)


@dataclass(frozen=True)
class RandomRows:
    """Rows drawn with one call of the op; its arguments beside the logits."""

    rows: Tensor  # [n] int64 into the sampled rows
    temperature: Tensor  # [n] float32
    top_k: Tensor  # [n] int64
    top_p: Tensor  # [n] float32
    min_p: Tensor  # [n] float32
    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    width: int


@dataclass(frozen=True)
class PenaltyRows:
    """Rows whose logits depend on what their sequences hold already."""

    slots: Int64s  # [n]
    ends: Int64s  # [n] the position of the token to sample
    rows: Tensor  # [n] int64 into the sampled rows
    last_inputs: Tensor  # [n] int64 into the step's tokens: each sequence's last input
    strengths: Tensor  # [3, n] float32: repetition, frequency, presence


@dataclass(frozen=True)
class SamplingStep:
    """What `prepare` found out about a step. Groups without rows are absent."""

    rows: int  # sampled rows
    any_greedy: bool
    random: tuple[RandomRows, ...]
    penalties: tuple[PenaltyRows, ...]
    bias_cells: Tensor  # [n] int64 into the flattened [rows, V] logits
    bias_values: Tensor  # [n] float32
    asking: Tensor  # [n] int64 into the sampled rows: those that want log-probabilities
    top_count: int  # the most alternatives any of them wants


@dataclass(frozen=True)
class Sampled:
    """A step's answer, on the device. Rows stand in the plan's order of sampled rows."""

    tokens: Tensor  # [S] int64
    finite: Tensor  # [S] bool; false = the token means nothing
    logprobs: Tensor  # [S] float32; 0 in rows that did not ask
    top_ids: Tensor  # [S, k] int64
    top_logprobs: Tensor  # [S, k] float32


class Sampler:
    """Per-slot parameters and the sampling of a step.

    Order of effects (as vLLM's): logit_bias and min_tokens, repetition then frequency and presence
    penalty, then for rows with a temperature the filters of `ops.sampling.draw`. Log-probabilities
    are those of the model's logits before any of this. Repetition looks at prompt and generated
    tokens, frequency and presence at generated ones alone.

    `draw_tokens` and `choose_tokens` are `ops.sampling.draw` and `greedy`, or routes of them.
    """

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_ids: Sequence[int],
        draw_tokens: Callable[..., Tensor] = draw.reference.run,
        choose_tokens: Callable[..., tuple[Tensor, Tensor]] = greedy.reference.run,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_ids = tuple(eos_ids)
        self.draw_tokens = draw_tokens
        self.choose_tokens = choose_tokens
        # Columns are slots, so that gathering a parameter of a thousand sequences reads little.
        self.floats = np.zeros((6, max_slots), dtype=np.float32)
        self.integers = np.zeros((4, max_slots), dtype=np.int64)
        self.wishes = np.zeros(max_slots, dtype=np.uint8)
        self.bias = TokenBias(max_slots)
        self.ends = TokenBias(max_slots)
        self.penalties = PenaltyCounts(max_slots, vocab_size, device)

    def admit(self, admitted: Sequence[Admitted]) -> None:
        """Take over the parameters of sequences that enter slots, in place of whoever was there."""
        for one in admitted:
            asked, slot = one.params, one.slot
            penalties = (
                asked.repetition_penalty,
                asked.frequency_penalty,
                asked.presence_penalty,
            )
            top_k = min(asked.top_k, self.vocab_size) or self.vocab_size
            may_end_at = one.prompt_length + asked.min_tokens
            self.floats[:, slot] = (asked.temperature, asked.top_p, asked.min_p, *penalties)
            self.integers[:, slot] = (top_k, asked.seed, may_end_at, asked.logprobs)
            ends = (*self.eos_ids, *asked.stop_token_ids) if asked.min_tokens else ()
            self.bias.put(slot, asked.logit_bias)
            self.ends.put(slot, dict.fromkeys(ends, -np.inf))
            penalised = penalties != (1.0, 0.0, 0.0)
            if penalised:
                self.penalties.remember(slot, one.known_ids, one.prompt_length)
            else:
                self.penalties.forget(slot)
            self.wishes[slot] = (
                _RANDOM * (asked.temperature >= GREEDY_BELOW)
                + _ORDERED * (top_k < self.vocab_size or asked.top_p < 1)
                + _PENALISED * penalised
                + _ASKING * (asked.logprobs >= 0)
                + _BIASED * bool(asked.logit_bias)
                + _HELD * bool(ends)
            )

    def prepare(self, plan: StepPlan) -> SamplingStep:
        """Everything about the step that the host can know. Array work alone, no wait."""
        sampled = np.flatnonzero(plan.samples)
        slots = plan.slots[sampled].astype(np.int64)
        positions = (plan.starts[sampled] + plan.counts[sampled]).astype(np.int64)
        wishes = self.wishes.take(slots)
        asking = np.flatnonzero(wishes & _ASKING)
        # Rows that need an order stand apart from those that do not.
        groups = [np.flatnonzero((wishes & (_RANDOM | _ORDERED)) == kind) for kind in _DRAWN]
        cells, values = self._biases(slots, positions, wishes)
        return SamplingStep(
            rows=len(slots),
            any_greedy=sum(map(len, groups)) < len(slots),
            random=tuple(
                self._random_rows(rows, slots[rows], positions[rows])
                for rows in groups
                if len(rows)
            ),
            penalties=self._penalty_rows(sampled, slots, positions, wishes, plan),
            bias_cells=self._upload(cells),
            bias_values=self._upload(values),
            asking=self._upload(asking),
            top_count=int(self.integers[_LOGPROBS].take(slots[asking]).max(initial=0)),
        )

    def _random_rows(self, rows: Int64s, slots: Int64s, positions: Int64s) -> RandomRows:
        count = len(rows)
        numbers = np.empty((6, count), dtype=np.int64)  # one copy to the device for all
        numbers[0], numbers[1] = rows, positions
        np.take(self.integers[: _SEED + 1], slots, axis=1, out=numbers[2:4], mode="clip")
        reals = numbers[4:].view(np.float32).reshape(4, count)
        np.take(self.floats[: _MIN_P + 1], slots, axis=1, out=reals[:3], mode="clip")
        there = self._upload(numbers)
        reals_there = there[4:].view(torch.float32).reshape(4, count)
        return RandomRows(
            rows=there[0],
            temperature=reals_there[_TEMPERATURE],
            top_k=there[2 + _TOP_K],
            top_p=reals_there[_TOP_P],
            min_p=reals_there[_MIN_P],
            seeds=there[2 + _SEED],
            positions=there[1],
            # The largest top_k; all where one has none, since top_k is then the vocabulary's size.
            width=int(numbers[2 + _TOP_K].max()) if self.wishes[slots[0]] & _ORDERED else 0,
        )

    def _penalty_rows(
        self,
        sampled: Int64s,
        slots: Int64s,
        positions: Int64s,
        wishes: NDArray[np.uint8],
        plan: StepPlan,
    ) -> tuple[PenaltyRows, ...]:
        rows = np.flatnonzero(wishes & _PENALISED)
        if not len(rows):
            return ()
        last = np.cumsum(plan.counts, dtype=np.int64)[sampled[rows]] - 1
        strengths = self.floats[_REPETITION:].take(slots[rows], axis=1)
        return (
            PenaltyRows(
                slots[rows],
                positions[rows],
                self._upload(rows),
                self._upload(last),
                self._upload(strengths),
            ),
        )

    def _biases(
        self, slots: Int64s, positions: Int64s, wishes: NDArray[np.uint8]
    ) -> tuple[Int64s, NDArray[np.float32]]:
        """Cells of the flattened logits and what to add to them."""
        held = np.flatnonzero(wishes & _HELD)
        held = held[positions[held] < self.integers[_MAY_END_AT].take(slots[held])]
        biased = np.flatnonzero(wishes & _BIASED)
        cells, values = [], []
        for rows, source in ((biased, self.bias), (held, self.ends)):
            owner, ids, added = source.gather(slots[rows])
            cells.append(rows[owner] * self.vocab_size + ids)
            values.append(added)
        return np.concatenate(cells), np.concatenate(values)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda" and len(array):
            tensor = tensor.pin_memory()  # from pageable memory the copy would wait
        return tensor.to(self.device, non_blocking=True)

    def sample(self, logits: Tensor, step: SamplingStep, inputs: Tensor) -> Sampled:
        """logits [S, V] of the plan's sampled rows, any floating dtype; inputs [T] int64: the
        step's tokens, none unknown. Never waits for the device. May write to float32 `logits`."""
        logits = logits.float()
        tokens, finite = self.choose_tokens(logits)
        raw = logits.index_select(0, step.asking) if len(step.asking) else logits[:0]
        if len(step.bias_cells):
            logits.view(-1).index_add_(0, step.bias_cells, step.bias_values)
        for penalised in step.penalties:
            self._penalise(logits, penalised, inputs)
        if step.any_greedy and (len(step.bias_cells) or step.penalties):
            tokens, _ = self.choose_tokens(logits)
        for group in step.random:
            every = len(group.rows) == step.rows
            drawn = self.draw_tokens(
                logits if every else logits.index_select(0, group.rows),
                group.temperature,
                group.top_k,
                group.top_p,
                group.min_p,
                group.seeds,
                group.positions,
                group.width,
            )
            tokens = drawn if every else tokens.index_copy(0, group.rows, drawn)
        logprobs, top_ids, top_logprobs = self._logprobs(raw, tokens, step)
        return Sampled(tokens, finite, logprobs, top_ids, top_logprobs)

    def _penalise(self, logits: Tensor, asked: PenaltyRows, inputs: Tensor) -> None:
        last_inputs = inputs.index_select(0, asked.last_inputs)
        rows = self.penalties.add(asked.slots, asked.ends, last_inputs)
        generated = self.penalties.generated.index_select(0, rows)
        seen = self.penalties.prompted.index_select(0, rows) | (generated > 0)
        chosen = logits.index_select(0, asked.rows)
        repetition, frequency, presence = asked.strengths[:, :, None]
        pushed = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(seen, pushed, chosen)
        chosen -= frequency * generated + presence * (generated > 0)
        logits.index_copy_(0, asked.rows, chosen)

    def _logprobs(
        self, raw: Tensor, tokens: Tensor, step: SamplingStep
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = raw.new_zeros(step.rows)
        top_ids = tokens.new_zeros(step.rows, step.top_count)
        top_logprobs = raw.new_zeros(step.rows, step.top_count)
        if len(step.asking):
            asked = token_logprobs(raw, tokens.index_select(0, step.asking), step.top_count)
            logprobs.index_copy_(0, step.asking, asked[0])
            top_ids.index_copy_(0, step.asking, asked[1])
            top_logprobs.index_copy_(0, step.asking, asked[2])
        return logprobs, top_ids, top_logprobs


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` int64 [n] and of the `count` best, from logits [n, V].

    For sampled tokens and, with the logits of a prompt's chunk, for the prompt's own (each token
    given those before it) -> float32 [n], int64 [n, count], float32 [n, count], best first.
    """
    logits = logits.float()
    whole = logits.logsumexp(dim=1, keepdim=True)
    best = logits.topk(count, dim=1)
    chosen = logits.gather(1, tokens[:, None])
    return (chosen - whole)[:, 0], best.indices, best.values - whole
