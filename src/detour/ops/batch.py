"""Batch: the device tensors of one step. Every field is always there, empty where it has nothing to say.

It stands beside the ops rather than in layers/ because attention's contract is written in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T tokens in R rows; row r owns tokens [row_starts[r], row_starts[r + 1]).

    A cache slot is page * page_size + offset. `kv_lengths` counts a row's tokens after this step's
    writes, so token t of row r attends to cache positions [0, positions[t]].
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    write_slots: Tensor  # [T] int64 cache slot each token's KV is written to
    row_of_token: Tensor  # [T] int64
    row_starts: Tensor  # [R + 1] int32
    kv_lengths: Tensor  # [R] int32
    page_table: Tensor  # [R, P] int32; columns beyond a row's length hold page 0
    logits_at: Tensor  # [S] int64 indices into T: the tokens whose logits are wanted
    page_size: int
    counts: NDArray[np.int32]  # [R] on the host: tokens per row
    lengths: NDArray[np.int32]  # [R] on the host: kv_lengths

    @property
    def rows(self) -> int:
        return len(self.counts)


def cut(batch: Batch, first: int, last: int) -> Batch:
    """Tokens [first, last), at least one, as a batch of their own that asks for no logits.

    Their sequences reach up to the last of them. Copies nothing to the device.
    """
    ends = batch.counts.cumsum()
    begin = int(np.searchsorted(ends, first, side="right"))
    stop = int(np.searchsorted(ends, last)) + 1
    ends, counts = ends[begin:stop], batch.counts[begin:stop]
    missing = max(int(ends[-1]) - last, 0)  # of the last row's tokens
    lengths = batch.lengths[begin:stop].copy()
    lengths[-1] -= missing
    kv_lengths = batch.kv_lengths[begin:stop]
    if missing:
        reached = (batch.positions[last - 1 : last] + 1).int()
        kv_lengths = torch.cat((kv_lengths[:-1], reached))
    return Batch(
        tokens=batch.tokens[first:last],
        positions=batch.positions[first:last],
        write_slots=batch.write_slots[first:last],
        row_of_token=batch.row_of_token[first:last] - begin,
        row_starts=batch.row_starts[begin : stop + 1].clamp(first, last) - first,
        kv_lengths=kv_lengths,
        page_table=batch.page_table[begin:stop, : -(-int(lengths.max()) // batch.page_size)],
        logits_at=batch.logits_at[:0],
        page_size=batch.page_size,
        counts=np.minimum(ends, last) - np.maximum(ends - counts, first),
        lengths=lengths,
    )
