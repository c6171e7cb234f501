"""StepPlan to Batch: what a step needs on the device, from numbers the host holds.

Keeps on the device what outlives a step: page tables and the last sampled tokens, by slot. Never
waits for the device.
"""

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
        self.columns = -(-context_length // page_size)
        self.page_table = torch.zeros(max_slots, self.columns, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(max_slots, REMEMBERED, dtype=torch.int64, device=device)

    def stage(self, plan: StepPlan) -> Batch:
        """The step's Batch, all tokens known. Staging a plan again gives the same."""
        counts, starts = plan.counts, plan.starts
        row_starts = np.concatenate([[0], counts.cumsum()])
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        first = starts - row_starts[:-1]  # position of token t of row r = first[r] + t
        positions = np.arange(len(plan.tokens)) + first[row_of_token]
        lengths = starts + counts
        parts = self._upload(
            [
                plan.tokens,
                positions,
                row_of_token,
                plan.slots[row_of_token],
                row_starts,
                lengths,
                plan.slots,
                row_starts[1:][plan.samples] - 1,
                plan.table_slots * np.int64(self.columns) + plan.table_columns,
                plan.table_pages,
                np.array([one.slot for one in plan.admitted], np.int64),
            ],
        )
        tokens, place, rows, slot_of_token, starts_there, lengths_there, slots, logits_at = parts[
            :8
        ]
        self._update_tables(*parts[8:])
        if (plan.tokens == UNKNOWN_TOKEN).any():
            tokens = self._resolve(tokens, slot_of_token, place)
        return Batch(
            tokens=tokens,
            positions=place,
            write_slots=self._write_slots(slot_of_token, place),
            row_of_token=rows,
            row_starts=starts_there.int(),
            kv_lengths=lengths_there.int(),
            page_table=self._rows(slots, int(lengths.max(initial=0))),
            logits_at=logits_at,
            page_size=self.page_size,
            counts=counts,
            lengths=lengths,
        )

    def remember(self, plan: StepPlan, tokens: Tensor) -> None:
        """Keep what was sampled [sampled] int64, for plans made before it reaches the host."""
        slots = plan.slots[plan.samples].astype(np.int64)
        ends = (plan.starts + plan.counts)[plan.samples]
        (places,) = self._upload([slots * REMEMBERED + ends % REMEMBERED])
        self.sampled.view(-1).index_copy_(0, places, tokens)

    def _upload(self, arrays: list[NDArray[np.int32]]) -> tuple[Tensor, ...]:
        """All arrays to the device as int64, in one copy."""
        sizes = [len(array) for array in arrays]
        together = torch.from_numpy(np.concatenate(arrays, dtype=np.int64, casting="safe"))
        if self.device.type != "cpu":
            # torch keeps pinned memory until the copies from it have run.
            together = together.pin_memory().to(self.device, non_blocking=True)
        return together.split(sizes)

    def _update_tables(self, cells: Tensor, pages: Tensor, admitted: Tensor) -> None:
        if len(admitted):
            self.page_table.index_fill_(0, admitted, 0)
        if len(cells):
            self.page_table.view(-1).index_copy_(0, cells, pages.int())

    def _resolve(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        held = self.sampled.view(-1).take(slots * REMEMBERED + positions % REMEMBERED)
        return torch.where(tokens == UNKNOWN_TOKEN, held, tokens)

    def _write_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        columns = positions.div(self.page_size, rounding_mode="floor")
        pages = self.page_table.view(-1).take(slots * self.columns + columns)
        return pages.long() * self.page_size + positions % self.page_size

    def _rows(self, slots: Tensor, longest: int) -> Tensor:
        used = -(-longest // self.page_size)
        return self.page_table[:, :used].index_select(0, slots)
