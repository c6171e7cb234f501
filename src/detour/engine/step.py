"""From the rows that the scheduler chose to the StepPlan, and what it must remember of it.

Decides nothing; moves the rows' `planned` and `expected` counts on.
"""

from dataclasses import dataclass

import numpy as np

from detour.engine.plan import UNKNOWN_TOKEN, Admitted, Bools, Int32s, StepPlan
from detour.engine.request import unpack_ids
from detour.engine.sequence import Int64s, Sequence, SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """Given tokens of one sequence that a step computes. Its counts have been moved on."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    samples: bool
    enters: bool  # the first of its slot

    @property
    def scores(self) -> int:
        params = self.sequence.request.params
        return params.prompt_logprobs if self.sequence.wants_prompt_logprobs else -1


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A plan whose result is not back."""

    step: int
    decodes: Bools  # [slots] which get one token each
    sampled: Int64s  # [samples] slots, in the plan's order
    chunks: list[Chunk]
    table_slots: Int32s  # [changes]

    def names(self, slot: int) -> bool:
        """Whether the plan computes tokens of this slot."""
        return bool(self.decodes[slot]) or any(chunk.slot == slot for chunk in self.chunks)

    def slots(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self.decodes).tolist()
        return rows + [chunk.slot for chunk in self.chunks]


def build_step(
    step: int,
    table: SlotTable,
    decodes: Bools,
    chunks: list[Chunk],
    changes: tuple[Int32s, Int32s, Int32s],
) -> tuple[StepPlan, Outstanding]:
    """One token for each slot that `decodes` marks, then the chunks."""
    slots = sampled = decodes.nonzero()[0]
    starts = table.planned[slots]
    # A decode's token is the last known one, or sampled by the step that is out.
    tokens = table.last[slots]
    tokens[starts >= table.known[slots]] = UNKNOWN_TOKEN
    table.planned += decodes
    table.expected += decodes
    samples = decodes[slots]  # all true
    counts = samples.astype(np.int32)
    scores = -counts
    if chunks:
        more = np.array([(c.slot, c.start, c.count, c.scores) for c in chunks], np.int32).T
        slots = np.concatenate((slots, more[0]))
        starts = np.concatenate((starts, more[1]))
        counts = np.concatenate((counts, more[2]))
        scores = np.concatenate((scores, more[3]))
        samples = np.concatenate((samples, np.array([c.samples for c in chunks])))
        sampled = slots[samples]
        pieces = [table.tokens[c.slot, c.start : c.start + c.count] for c in chunks]
        tokens = np.concatenate((tokens, *pieces))
    changed, columns, pages = changes
    plan = StepPlan(
        step=step,
        slots=slots.astype(np.int32),
        starts=starts,
        counts=counts,
        tokens=tokens,
        samples=samples,
        prompt_logprobs=scores,
        table_slots=changed,
        table_columns=columns,
        table_pages=pages,
        admitted=tuple([_admitted(chunk.sequence) for chunk in chunks if chunk.enters]),
    )
    return plan, Outstanding(step, decodes, sampled, chunks, changed)


def _admitted(sequence: Sequence) -> Admitted:
    return Admitted(
        sequence.slot,
        sequence.request.params,
        sequence.prompt_length,
        unpack_ids(sequence.ids),
    )
