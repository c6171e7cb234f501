"""One stream of tokens: how many are known, computed, planned; and all running ones side by side.

A `Sequence` is what the scheduler knows of a request from submit to finish. While it runs it has a
slot, and its numbers are row `slot` of the `SlotTable`'s arrays, so that a step over a thousand
sequences is a few array operations. Knows nothing of who runs next.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detour.engine.plan import Bools, Geometry, Int32s
from detour.engine.request import FinishReason, Request, unpack_ids

# Token arrays of two dimensions are only touched where sequences are: reserved, not resident.
Int64s = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    namespace: str  # of the prefix tree
    arrival: int  # order of submission
    ids: bytes  # int32 [known], as of the last time it was out of a slot
    prompt_length: int
    slot: int = -1  # -1 = waiting
    started: bool = False  # its Started was emitted
    cached_tokens: int = -1  # taken from the tree when first admitted; -1 = not yet admitted
    logprobs_end: int = 0  # prompt log-probabilities were emitted for positions below this
    overtaken_at: int = 0  # how many admissions there had been when it was queued
    leaders: "list[tuple[Sequence, int]]" = field(default_factory=list)  # see engine.waiting

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller runs earlier."""
        return -self.request.priority, self.arrival

    @property
    def wants_prompt_logprobs(self) -> bool:
        asked = self.request.params.prompt_logprobs >= 0 and not self.request.output_ids
        return asked and self.logprobs_end < self.prompt_length

    def ending(self, token: int, known: int, eos_ids: frozenset[int], limit: int) -> "Ending":
        """Whether `token`, the last of `known` ones, ends the sequence."""
        params = self.request.params
        if known - self.prompt_length > params.min_tokens:
            if token in params.stop_token_ids:
                return Ending("stop", token)
            if token in eos_ids and not params.ignore_eos:
                return Ending("stop", token)
        return Ending("length", -1) if known >= limit else NOT_YET


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    matched: int
    happened: bool = True


NOT_YET = Ending("stop", -1, happened=False)


class SlotTable:
    """Structure of arrays over slots. Rows of slots without a sequence are zero (`alive` false).

    For a sequence: computed <= planned <= expected, computed <= known <= expected. `planned` counts
    tokens whose KV is written or being written by steps that are out; `expected` counts tokens that
    will be known once these steps are back. What is neither planned nor beyond `target` may be
    planned next.
    """

    def __init__(self, geometry: Geometry) -> None:
        slots, context = geometry.max_slots, geometry.context_length
        columns = -(-context // geometry.page_size)
        self.page_size = geometry.page_size
        self.context_length = context
        # Rows are an odd number of cache lines apart: a step writes the same few columns of all
        # rows, which must not fall into one set of the processor's cache.
        line = 64 // 4
        width = (context // line + 1 | 1) * line
        self._places: Int32s = np.empty(slots * width, np.int32)
        self._rows: Int64s = np.arange(slots) * width  # where each slot's tokens begin
        self.tokens: Int32s = self._places.reshape(slots, width)[:, :context]
        self.page_table: Int32s = np.empty((slots, columns), np.int32)
        self.last: Int32s = np.zeros(slots, np.int32)  # the last known token
        self.known: Int32s = np.zeros(slots, np.int32)
        self.computed: Int32s = np.zeros(slots, np.int32)
        self.planned: Int32s = np.zeros(slots, np.int32)
        self.expected: Int32s = np.zeros(slots, np.int32)
        self.target: Int32s = np.zeros(slots, np.int32)  # tokens that are ever computed
        self.limit: Int32s = np.zeros(slots, np.int32)  # tokens that are ever known
        self.capacity: Int32s = np.zeros(slots, np.int32)  # tokens that its pages hold
        self.tree_pages: Int32s = np.zeros(slots, np.int32)  # its first pages, owned by the tree
        self.alive: Bools = np.zeros(slots, np.bool_)
        self.decoding: Bools = np.zeros(slots, np.bool_)  # all given tokens are planned
        self.wants_logprobs: Bools = np.zeros(slots, np.bool_)
        self.sids: Int64s = np.zeros(slots, np.int64)
        self.sequences: dict[int, Sequence] = {}
        # Tokens that may end some running sequence: eos, and what they ask for (counted).
        self.may_end: Bools = np.zeros(geometry.vocab_size, np.bool_)
        self.may_end[list(geometry.eos_ids)] = True
        self._asked = Counter(geometry.eos_ids)

    def enter(self, sequence: Sequence, slot: int, cached: int) -> Int32s:
        """Put a sequence whose first `cached` tokens have KV into a slot; its known tokens."""
        ids = unpack_ids(sequence.ids)
        params = sequence.request.params
        known, prompt = len(ids), sequence.prompt_length
        limit = limit_of(sequence, self.context_length)
        self.tokens[slot, :known] = ids
        self.last[slot] = ids[-1]
        self.known[slot] = self.expected[slot] = known
        self.computed[slot] = self.planned[slot] = cached
        self.limit[slot] = limit
        # The last token is never computed, except that of a prompt that is only scored.
        self.target[slot] = limit - 1 if limit > prompt else prompt
        self.alive[slot] = True
        self.wants_logprobs[slot] = params.logprobs >= 0
        self.sids[slot] = sequence.request.sid
        self._asked.update(params.stop_token_ids)
        for token in params.stop_token_ids:
            self.may_end[token] = True
        self.sequences[slot] = sequence
        sequence.slot = slot
        return ids

    def leave(self, sequence: Sequence) -> None:
        """Forget the sequence in its slot; its known tokens are in `sequence.ids`."""
        slot = sequence.slot
        sequence.ids = self.tokens[slot, : self.known[slot]].tobytes()
        for column in (self.known, self.computed, self.planned, self.expected, self.target):
            column[slot] = 0
        self.limit[slot] = self.capacity[slot] = self.tree_pages[slot] = 0
        self.alive[slot] = self.decoding[slot] = self.wants_logprobs[slot] = False
        for token in sequence.request.params.stop_token_ids:
            self._asked[token] -= 1
            if not self._asked[token]:
                del self._asked[token]
                self.may_end[token] = False
        del self.sequences[slot]
        sequence.slot = -1

    def append(self, slots: Int64s, tokens: Int32s) -> Int32s:
        """One more known token for each of these slots; how many they have now."""
        known = self.known[slots]
        self._places[self._rows[slots] + known] = tokens
        known += 1
        self.known[slots] = known
        self.last[slots] = tokens
        return known

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def violations(self) -> list[str]:
        """What contradicts the order of the counts, a sentence each."""
        found = []
        for small, large in (
            ("computed", "planned"),
            ("planned", "expected"),
            ("computed", "known"),
            ("known", "expected"),
            ("known", "limit"),
            ("expected", "limit"),
            ("planned", "capacity"),
        ):
            columns = vars(self)
            if (columns[small] > columns[large])[self.alive].any():
                found.append(f"a sequence has more tokens {small} than {large}")
        if set(np.flatnonzero(self.alive).tolist()) != set(self.sequences):
            found.append("the slots marked alive are not those with a sequence")
        return found


def limit_of(sequence: Sequence, context_length: int) -> int:
    """The most tokens, prompt included, that this sequence will ever have."""
    return min(sequence.prompt_length + sequence.request.params.max_tokens, context_length)
