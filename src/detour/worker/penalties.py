"""Which tokens a sequence has seen and how often, for the sequences that ask for a penalty.

Counts are kept per position: running a step again, or running again from an earlier step, first
takes back what later positions had added, so logits do not depend on how often a step was run.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_REMEMBERED = 4  # steps that can be taken back; at most two are ever out
_NO_ROW = -1


class PenaltyCounts:
    """Count rows for some of `max_slots` slots: [rows, vocab], grown as more sequences ask at once.

    `row_of[slot]` is the slot's row or -1. A row is given back when its slot is admitted anew
    without penalties.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.row_of = np.full(max_slots, _NO_ROW, dtype=np.int64)
        self.counted = np.zeros(max_slots, dtype=np.int64)  # positions [0, counted) are in
        self.base = np.zeros(max_slots, dtype=np.int64)  # of these, the ones known at admission
        self.free: list[int] = []
        self.generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.prompted = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.recent = torch.zeros(0, _REMEMBERED, dtype=torch.int64, device=device)

    def forget(self, slot: int) -> None:
        row = int(self.row_of[slot])
        if row != _NO_ROW:
            self.free.append(row)
            self.row_of[slot] = _NO_ROW

    def remember(self, slot: int, known_ids: NDArray[np.int32], prompt_length: int) -> None:
        """Start the slot's counts from what is known of its sequence."""
        if self.row_of[slot] == _NO_ROW:
            if not self.free:
                self._grow()
            self.row_of[slot] = self.free.pop()
        row = int(self.row_of[slot])
        known = torch.from_numpy(known_ids.astype(np.int64)).to(self.device)
        self.prompted[row].zero_()
        self.prompted[row][known[:prompt_length]] = True
        self.generated[row] = torch.bincount(known[prompt_length:], minlength=self.vocab_size)
        self.counted[slot] = self.base[slot] = len(known_ids)

    def _grow(self) -> None:
        have = len(self.generated)
        more = min(max(4, have), len(self.row_of) - have)

        def grown(old: Tensor) -> Tensor:
            return torch.cat([old, old.new_zeros(more, old.shape[1])])

        self.generated = grown(self.generated)
        self.prompted = grown(self.prompted)
        self.recent = grown(self.recent)
        self.free.extend(range(have + more - 1, have - 1, -1))

    def add(self, slots: NDArray[np.int64], ends: NDArray[np.int64], last_inputs: Tensor) -> Tensor:
        """Count each sequence's token at position end - 1 -> its row, int64 [n] on the device.

        slots [n] have rows; ends [n]: positions [0, end) are inputs by now; last_inputs int64 [n]
        on the device: the tokens at end - 1. Those before were counted at admission or by earlier
        steps.
        """
        rows = self.row_of[slots]
        last = ends - 1
        for back in range(int((self.counted[slots] - last).max())):
            # A run of this step or of a later one had counted this position: take that back.
            again = np.flatnonzero(
                (self.counted[slots] > last + back) & (last + back >= self.base[slots])
            )
            if len(again):
                cells = self._upload(rows[again], (last[again] + back) % _REMEMBERED)
                self._count(cells[0], self.recent[cells[0], cells[1]], -1)
        fresh = np.flatnonzero(last >= self.base[slots])
        if len(fresh):
            cells = self._upload(rows[fresh], last[fresh] % _REMEMBERED, fresh)
            tokens = last_inputs[cells[2]]
            self.recent[cells[0], cells[1]] = tokens
            self._count(cells[0], tokens, 1)
        self.counted[slots] = np.maximum(ends, self.base[slots])
        return self._upload(rows)[0]

    def _count(self, rows: Tensor, tokens: Tensor, change: int) -> None:
        # Rows are distinct, so no cell is written twice and a plain indexed update is exact.
        self.generated[rows, tokens] += change

    def _upload(self, *columns: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.stack(columns)).to(self.device, non_blocking=True)
