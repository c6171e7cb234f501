"""Batch: the device tensors of one step. Every field is always there, empty where it has nothing to say.

It stands beside the ops rather than in layers/ because attention's contract is written in it.
"""

from dataclasses import dataclass

import numpy as np
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
