"""From the rows that the scheduler chose to the StepPlan, and what it must remember of it.

Decides nothing; moves the rows' `planned` and `expected` counts on.
"""

from dataclasses import dataclass

import numpy as np

from detour.engine.plan import UNKNOWN_TOKEN, Admitted, Int32s, StepPlan
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
    slots: Int64s  # [rows]
    counts: Int32s  # [rows]
    sampled: Int64s  # [samples] slots
    chunks: list[Chunk]
    table_slots: Int64s  # [changes]

    def names(self, slot: int) -> bool:
        return bool((self.slots == slot).any())


def build_step(
    step: int,
    table: SlotTable,
    decodes: Int64s,
    chunks: list[Chunk],
    changes: tuple[Int64s, Int64s, Int32s],
) -> tuple[StepPlan, Outstanding]:
    """One token for each slot of `decodes`, then the chunks."""
    starts = table.planned[decodes]
    tokens = table.tokens[decodes, starts]
    tokens[starts >= table.known[decodes]] = UNKNOWN_TOKEN
    table.planned[decodes] += 1
    table.expected[decodes] += 1
    rows = len(decodes)
    slots, counts = decodes, np.ones(rows, np.int32)
    samples, scores = np.ones(rows, np.bool_), np.full(rows, -1, np.int32)
    sampled = decodes
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
        table_slots=changed.astype(np.int32),
        table_columns=columns.astype(np.int32),
        table_pages=pages,
        admitted=tuple(_admitted(chunk.sequence) for chunk in chunks if chunk.enters),
    )
    return plan, Outstanding(step, slots, counts, sampled, chunks, changed)


def _admitted(sequence: Sequence) -> Admitted:
    return Admitted(
        sequence.slot,
        sequence.request.params,
        sequence.prompt_length,
        unpack_ids(sequence.ids),
    )
