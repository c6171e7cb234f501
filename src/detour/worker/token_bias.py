"""Numbers added to a few logits of a sequence: logit_bias, and -inf on its ends until min_tokens.

Kept as one growing pair of arrays (ids, values) with each slot's part beside it, so that gathering
those of a thousand sequences is array work.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_SMALLEST = 1024


class TokenBias:
    """Per slot, a list of (token id, value); empty for most."""

    def __init__(self, max_slots: int) -> None:
        self.starts = np.zeros(max_slots, dtype=np.int64)
        self.lengths = np.zeros(max_slots, dtype=np.int64)
        self.ids = np.zeros(_SMALLEST, dtype=np.int64)
        self.values = np.zeros(_SMALLEST, dtype=np.float32)
        self.used = 0

    def put(self, slot: int, bias: Mapping[int, float]) -> None:
        """Replace the slot's list."""
        self.lengths[slot] = 0
        if not bias:
            return
        if self.used + len(bias) > len(self.ids):
            self._make_room(len(bias))
        self.starts[slot], self.lengths[slot] = self.used, len(bias)
        self.ids[self.used : self.used + len(bias)] = np.fromiter(bias, np.int64, len(bias))
        self.values[self.used : self.used + len(bias)] = np.fromiter(
            bias.values(), np.float32, len(bias)
        )
        self.used += len(bias)

    def _make_room(self, wanted: int) -> None:
        """Close the gaps that replaced lists left, and double the arrays if they stay half full."""
        slots = np.flatnonzero(self.lengths)
        _, where = self._spread(slots)
        live = len(where)
        size = max(_SMALLEST, 1 << int(2 * (live + wanted)).bit_length())
        ids = np.zeros(size, dtype=np.int64)
        values = np.zeros(size, dtype=np.float32)
        ids[:live], values[:live] = self.ids[where], self.values[where]
        self.starts[slots] = np.cumsum(self.lengths[slots]) - self.lengths[slots]
        self.ids, self.values, self.used = ids, values, live

    def _spread(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        lengths = self.lengths[slots]
        owner = np.repeat(np.arange(len(slots)), lengths)
        first = np.cumsum(lengths) - lengths
        return owner, np.arange(len(owner)) + np.repeat(self.starts[slots] - first, lengths)

    def gather(
        self, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """The lists of `slots` in turn -> (index into slots, token id, value), [n] each."""
        owner, where = self._spread(slots)
        return owner, self.ids[where], self.values[where]
