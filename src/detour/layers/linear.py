"""Linear layers: several checkpoint matrices fused into one product, shared among ranks.

A layer shares its outputs (each rank computes some), its inputs (each rank sums over some, then all
ranks add up), or neither.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from detour.layers.weight import Matrix, Piece, Site, empty
from detour.parallel.group import WHOLE, Share

Split = Literal["none", "outputs", "inputs"]


@dataclass(frozen=True)
class Part:
    """One of a fused layer's matrices: `rows` outputs in `units` indivisible units (heads)."""

    name: str  # of the module: its tensors are name.weight and name.bias
    rows: int
    units: int


class Linear:
    """x @ W.T + bias, W being the parts one below the other.

    `outputs` is the number of columns this rank's result has.
    """

    def __init__(
        self,
        site: Site,
        parts: tuple[Part, ...],
        inputs: int,
        *,
        bias: bool = False,
        split: Split = "none",
    ) -> None:
        shares = [_share(site, part, split) for part in parts]
        columns = site.group.share(inputs, "inputs") if split == "inputs" else WHOLE
        self.group = site.group
        self.split = split
        self.sizes = [part.rows // share.parts for part, share in zip(parts, shares, strict=True)]
        self.outputs = sum(self.sizes)
        weights, biases = [], []
        start = 0
        for part, share, size in zip(parts, shares, self.sizes, strict=True):
            into = (slice(start, start + size),)
            shape = (part.rows, inputs)
            weights.append(Piece(f"{part.name}.weight", shape, share, columns, into))
            biases.append(Piece(f"{part.name}.bias", (part.rows,), share, into=into))
            start += size
        self.matrix = site.matrix((self.outputs, inputs // columns.parts), *weights)
        self.bias = site.tensor((self.outputs,), *biases, spread=0.02) if bias else None
        self.no_bias = empty(site)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, inputs of this rank] -> [T, outputs]; with split "inputs" the sum over all ranks."""
        bias = self.no_bias if self.bias is None else self.bias.value
        if self.split != "inputs":
            return project(self.matrix, x, bias)
        if self.group.rank > 0:
            bias = self.no_bias  # it is added once
        return self.group.all_reduce(project(self.matrix, x, bias))


def project(matrix: Matrix, x: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = matrix.route(matrix.prepared, x, bias)
    return result


def _share(site: Site, part: Part, split: Split) -> Share:
    return site.group.share(part.units, f"units of {part.name}") if split == "outputs" else WHOLE
