"""The ranks of one tensor-parallel group: who takes which share, and what they exchange.

Knows no layer and no model. A group of one exchanges nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from detour.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """Part `index` of `parts` equal, contiguous parts."""

    index: int
    parts: int

    def of(self, size: int) -> slice:
        """The range of a dimension of `size` that this part is."""
        step = size // self.parts
        return slice(self.index * step, (self.index + 1) * step)


WHOLE = Share(0, 1)


@dataclass(frozen=True)
class Group:
    """Rank `rank` of `size`. Only a group of one can compute yet."""

    rank: int = 0
    size: int = 1

    def share(self, units: int, what: str) -> Share:
        """This rank's share of `units` indivisible things (heads, columns).

        Fewer units than ranks are repeated, each on equally many ranks. Raises ConfigError, naming
        `what`, where neither number divides the other.
        """
        if units % self.size == 0:
            return Share(self.rank, self.size)
        if self.size % units == 0:
            return Share(self.rank * units // self.size, units)
        raise ConfigError(f"{units} {what} cannot be shared by {self.size} ranks.")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank; may be x itself, written over."""
        if self.size == 1:
            return x
        raise NotImplementedError("ranks cannot exchange tensors yet")

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [..., n] side by side, in rank order -> [..., n * size]."""
        if self.size == 1:
            return x
        raise NotImplementedError("ranks cannot exchange tensors yet")
