"""An executor without a model: tokens come from a rule, and every page is watched."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from detour.engine.plan import (
    UNKNOWN_TOKEN,
    Geometry,
    PromptRowLogprobs,
    StepPlan,
    StepResult,
)
from detour.engine.request import FinishReason, Request, unpack_ids
from detour.sampling_params import SamplingParams


def geometry(**changes) -> Geometry:
    values = {
        "num_pages": 64,
        "page_size": 4,
        "max_slots": 8,
        "context_length": 128,
        "vocab_size": 50,
        "kv_bytes_per_token": 1,
        "eos_ids": (0,),
    }
    return Geometry(**{**values, **changes})


def chain(before: int, token: int) -> int:
    """Stands for the KV of a token: it depends on all tokens before it."""
    return hash((before, token, 17))


def rule_token(
    history: int, count: int, prompt_length: int, params: SamplingParams, geometry: Geometry
) -> int:
    """The token after `count` tokens whose last KV is `history`: the fake model and its sampler."""
    token = hash((history, params.seed)) % geometry.vocab_size
    if count - prompt_length < params.min_tokens:
        enders = set(params.stop_token_ids) | set(() if params.ignore_eos else geometry.eos_ids)
        while token in enders:
            token = (token + 1) % geometry.vocab_size
    return token


def run_alone(request: Request, geometry: Geometry) -> tuple[list[int], FinishReason, int]:
    """What FakeExecutor's rule makes of a request: new tokens, finish reason, matched token."""
    params = request.params
    ids = unpack_ids(request.prompt_ids).tolist()
    prompt_length = len(ids)
    ids += unpack_ids(request.output_ids).tolist()
    given, history = len(ids), 0
    for token in ids:
        history = chain(history, token)
    limit = min(prompt_length + params.max_tokens, geometry.context_length)
    while len(ids) < limit:
        token = rule_token(history, len(ids), prompt_length, params, geometry)
        ids.append(token)
        history = chain(history, token)
        if len(ids) - prompt_length > params.min_tokens:
            if token in params.stop_token_ids:
                return ids[given:], "stop", token
            if token in geometry.eos_ids and not params.ignore_eos:
                return ids[given:], "stop", token
    return ids[given:], "length", -1


@dataclass
class _Slot:
    params: SamplingParams
    prompt_length: int
    ids: list[int]
    chains: list[int] = field(default_factory=list)
    computed: int = -1  # -1 = nothing yet: its first row may start after a cached prefix

    def extend(self) -> None:
        for token in self.ids[len(self.chains) :]:
            self.chains.append(chain(self.chains[-1] if self.chains else 0, token))


class FakeExecutor:
    """Computes by a rule, and asserts on the way that the engine keeps the contract.

    Each page slot remembers whose KV it holds: the chain hash of the tokens up to it. A row that
    attends to a slot which does not hold exactly the KV of its own prefix fails the test, so no
    page can be shared, freed or overwritten wrongly without being seen.

    Steps run when they are collected. `raise_on`: steps whose collect raises; `refuse`: steps whose
    submit raises. `not_finite`: seeds of requests whose logits are not finite.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        step_seconds: float = 0.0,
        raise_on: Iterable[int] = (),
        refuse: Iterable[int] = (),
        not_finite: Iterable[int] = (),
    ) -> None:
        self._geometry = geometry
        self._seconds = step_seconds
        self._raise_on, self._refuse = set(raise_on), set(refuse)
        self._not_finite = set(not_finite)
        self._ready_at = 0.0
        self._out: deque[tuple[StepPlan, float]] = deque()
        self._table = np.zeros(
            (geometry.max_slots, -(-geometry.context_length // geometry.page_size)), np.int32
        )
        self._kv = np.zeros(geometry.num_pages * geometry.page_size, np.int64)
        self._slots: dict[int, _Slot] = {}
        self.plans: list[StepPlan] = []
        self.closed = False

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def submit(self, plan: StepPlan) -> None:
        assert not self.closed
        assert len(self._out) < 2, "a third step"
        if plan.step in self._refuse:
            raise RuntimeError(f"step {plan.step} refused")
        self.plans.append(plan)
        self._ready_at = max(self._ready_at, time.monotonic()) + self._seconds
        self._out.append((plan, self._ready_at))

    def collect(self) -> StepResult:
        plan, ready_at = self._out.popleft()
        if self._seconds:
            time.sleep(max(0.0, ready_at - time.monotonic()))
        if plan.step in self._raise_on:
            self._out.clear()
            raise RuntimeError(f"step {plan.step} failed")
        return self._run(plan)

    def close(self) -> None:
        self.closed = True

    def _run(self, plan: StepPlan) -> StepResult:
        assert len(set(plan.slots.tolist())) == len(plan.slots) > 0
        assert plan.counts.min() >= 1 and plan.counts.sum() == len(plan.tokens)
        if len(plan.table_pages):
            assert plan.table_pages.min() > 0 and plan.table_pages.max() < self.geometry.num_pages
        self._table[plan.table_slots, plan.table_columns] = plan.table_pages
        for entry in plan.admitted:
            self._slots[entry.slot] = _Slot(
                entry.params, entry.prompt_length, entry.known_ids.tolist()
            )
        begins = np.cumsum(plan.counts) - plan.counts
        written: set[int] = set()
        for row, slot in enumerate(plan.slots.tolist()):
            tokens = plan.tokens[begins[row] : begins[row] + plan.counts[row]]
            pages = self._compute(self._slots[slot], slot, int(plan.starts[row]), tokens)
            assert not pages & written, "two rows write the same page"
            written |= pages
        return self._sample(plan)

    def _compute(self, state: _Slot, slot: int, start: int, tokens: np.ndarray) -> set[int]:
        """Attend and write; the pages written."""
        end, size = start + len(tokens), self.geometry.page_size
        assert end <= len(state.ids), "a token that nobody knows is computed"
        assert state.computed in (-1, start), "tokens are computed once, in order"
        state.computed = end
        state.extend()
        for token, mine in zip(tokens.tolist(), state.ids[start:end], strict=True):
            assert token in (mine, UNKNOWN_TOKEN), "the plan's token is not the sequence's"
        positions = np.arange(end)
        places = self._table[slot, positions // size] * size + positions % size
        expected = np.array(state.chains[:end], np.int64)
        assert (self._kv[places[:start]] == expected[:start]).all(), "attends to foreign KV"
        self._kv[places[start:]] = expected[start:]
        pages = set((places[start:] // size).tolist())
        assert 0 not in pages, "writes to page 0"
        return pages

    def _sample(self, plan: StepPlan) -> StepResult:
        slots = plan.slots[plan.samples]
        tokens, finite = [], []
        most = 0
        for slot in slots.tolist():
            state = self._slots[slot]
            assert state.computed == len(state.ids), "samples before all known tokens are computed"
            token = rule_token(
                state.chains[-1], len(state.ids), state.prompt_length, state.params, self.geometry
            )
            state.ids.append(token)
            tokens.append(token)
            finite.append(state.params.seed not in self._not_finite)
            most = max(most, state.params.logprobs)
        n = len(tokens)
        best = np.tile(np.arange(most, dtype=np.int32), (n, 1))
        return StepResult(
            step=plan.step,
            slots=slots,
            tokens=np.array(tokens, np.int32),
            logprobs=-np.array(tokens, np.float32),
            top_ids=best,
            top_logprobs=-best.astype(np.float32),
            finite=np.array(finite, np.bool_),
            prompt_logprobs=tuple(self._score(plan)),
        )

    def _score(self, plan: StepPlan) -> list[PromptRowLogprobs]:
        scored = []
        for row, k in enumerate(plan.prompt_logprobs.tolist()):
            if k >= 0:
                slot = int(plan.slots[row])
                state, first = self._slots[slot], int(plan.starts[row]) + 1
                end = min(first + int(plan.counts[row]), state.prompt_length)
                values = -np.array(state.ids[first:end], np.float32)
                best = np.tile(np.arange(k, dtype=np.int32), (len(values), 1))
                scored.append(
                    PromptRowLogprobs(slot, first, values, best, -best.astype(np.float32))
                )
        return scored
