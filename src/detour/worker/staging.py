"""StepPlan to Batch: what a step needs on the device, from numbers the host holds.

Keeps on the device what outlives a step: page tables and the last sampled tokens, by slot. Never
waits for the device.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detour.engine.plan import UNKNOWN_TOKEN, StepPlan
from detour.ops.batch import Batch

# A token planned as unknown was sampled at most this many positions before the newest one.
REMEMBERED = 4


class Staging:
    """Persistent buffers of one rank and the way from plan to Batch."""

    def __init__(
        self, max_slots: int, context_length: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.max_slots = max_slots
        self.columns = -(-context_length // page_size)
        # One slot more than sequences may have: padded rows stand in it, all their pages page 0.
        rows = max_slots + 1
        self.page_table = torch.zeros(rows, self.columns, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(rows, REMEMBERED, dtype=torch.int64, device=device)

    def stage(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """The step's Batch, all tokens known, and where `remember` puts what it samples.

        Staging a plan again gives the same.
        """
        there = self._upload(*self.numbers(plan))
        self.update_tables(plan)
        unknown = plan.tokens.min(initial=0) == UNKNOWN_TOKEN
        return self.assemble(there, plan.counts, plan.starts + plan.counts, unknown=unknown)

    def numbers(self, plan: StepPlan) -> tuple[NDArray[np.integer[Any]], ...]:
        """What `assemble` needs of the plan: how long each is depends on rows and tokens alone."""
        counts, starts = plan.counts, plan.starts
        row_starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=row_starts[1:])
        rows = np.repeat(np.arange(len(counts)), counts)
        first = starts - row_starts[:-1]  # position of token t of row r = first[r] + t
        positions = np.arange(len(plan.tokens)) + first[rows]
        columns, offsets = np.divmod(positions, self.page_size)
        slots = plan.slots.astype(np.int64)
        slot_of_token = slots[rows]
        lengths = starts + counts
        return (
            plan.tokens,
            positions,
            rows,
            slot_of_token * self.columns + columns,
            offsets,
            slot_of_token * REMEMBERED + positions % REMEMBERED,
            row_starts,
            lengths,
            slots,
            row_starts[1:][plan.samples] - 1,
            (slots * REMEMBERED + lengths % REMEMBERED)[plan.samples],
        )

    def assemble(
        self,
        there: tuple[Tensor, ...],
        counts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        unknown: bool,
    ) -> tuple[Batch, Tensor]:
        """The Batch of `numbers` that lie on the device, and places; waits for nothing.

        unknown: some tokens may be UNKNOWN_TOKEN. The page table is as wide as `lengths` need.
        """
        tokens, positions, rows, cells, offsets, held = there[:6]
        row_starts, kv_lengths, slots, logits_at, places = there[6:]
        if unknown:
            sampled = self.sampled.view(-1).index_select(0, held)
            tokens = torch.where(tokens == UNKNOWN_TOKEN, sampled, tokens)
        pages = self.page_table.view(-1).index_select(0, cells)
        used = -(-int(lengths.max(initial=0)) // self.page_size)
        batch = Batch(
            tokens=tokens,
            positions=positions,
            write_slots=torch.add(offsets, pages, alpha=self.page_size),
            row_of_token=rows,
            row_starts=row_starts.int(),
            kv_lengths=kv_lengths.int(),
            page_table=self.page_table[:, :used].index_select(0, slots),
            logits_at=logits_at,
            page_size=self.page_size,
            counts=counts,
            lengths=lengths,
        )
        return batch, places

    def remember(self, places: Tensor, tokens: Tensor) -> None:
        """Keep what was sampled [sampled] int64, for plans made before it reaches the host.

        places: as `stage` gave them for the step.
        """
        self.sampled.view(-1).index_copy_(0, places, tokens)

    def _upload(self, *arrays: NDArray[np.integer[Any]]) -> tuple[Tensor, ...]:
        """All arrays to the device as int64, in one copy."""
        together = self.join(arrays)
        return together.to(self.device, non_blocking=True).split([len(array) for array in arrays])

    def join(self, arrays: tuple[NDArray[np.integer[Any]], ...]) -> Tensor:
        """One int64 tensor on the host, pinned where a copy to the device is not to wait."""
        together = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
        # torch keeps pinned memory until the copies from it have run.
        return together if self.device.type == "cpu" else together.pin_memory()

    def update_tables(self, plan: StepPlan) -> None:
        """A slot's pages are forgotten when a sequence enters it, then the changes are made."""
        if not (plan.admitted or len(plan.table_slots)):
            return
        cells = plan.table_slots * np.int64(self.columns) + plan.table_columns
        entered = np.array([one.slot for one in plan.admitted], np.int64)
        cells_there, pages, admitted = self._upload(cells, plan.table_pages, entered)
        self.page_table.index_fill_(0, admitted, 0)
        self.page_table.view(-1).index_copy_(0, cells_there, pages.int())
