"""The routed experts of one layer: how their weights are stored, and their product.

Knows no router and no shared expert. Ranks share the experts' widths. The weights stay packed as
the checkpoint packs them; what is not packed alike in all experts of the layer is unpacked.
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from detour.layers.weight import (
    Expected,
    Kinds,
    Parameter,
    Piece,
    Site,
    one_kind,
    plain_numbers,
)
from detour.loading.checkpoint import Checkpoint
from detour.loading.scaled import FP8_BLOCK, NVFP4_BLOCK, ScaledTensor
from detour.ops.gemm_scaled import scale_bytes
from detour.ops.moe import moe
from detour.ops.moe_fp8 import moe_fp8, random_experts
from detour.ops.moe_nvfp4 import moe_nvfp4, random_nvfp4
from detour.ops.op import Op
from detour.ops.route import Route

log = logging.getLogger(__name__)

OPS: dict[str, Op] = {"": moe, "NVFP4": moe_nvfp4, "FP8": moe_fp8}


class ExpertWeights(Parameter):
    """Gate, up and down of every expert, as the arguments of the op that computes on them.

    form      "" (plain numbers), "NVFP4" or "FP8"
    tensors   what the op takes between x and the routing: see moe, moe_nvfp4 and moe_fp8
    """

    def __init__(self, site: Site, name: str, sizes: tuple[int, int, int]) -> None:
        hidden, width, count = sizes
        share = site.group.share(width, "expert columns")
        own = width // share.parts
        pieces = []
        for expert in range(count):
            for place, part in enumerate(("gate_proj", "up_proj")):
                into = (expert, slice(place * own, (place + 1) * own))
                name_of = f"{name}.{expert}.{part}.weight"
                pieces.append(Piece(name_of, (width, hidden), rows=share, into=into))
            name_of = f"{name}.{expert}.down_proj.weight"
            pieces.append(Piece(name_of, (hidden, width), columns=share, into=(expert,)))
        super().__init__((count, 3 * own, hidden), tuple(pieces), site.dtype, hidden**-0.5)
        self.gate_up = tuple(piece for piece in pieces if len(piece.into) == 2)
        self.down = tuple(piece for piece in pieces if len(piece.into) == 1)
        self.sizes = (count, hidden, own)
        self.form = ""
        self.tensors: tuple[Tensor, ...] = ()
        self.route: Route

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def matrices(self) -> tuple[tuple[tuple[int, int, int], tuple[Piece, ...]], ...]:
        """Shape and pieces of gate and up (one below the other), and of down."""
        count, hidden, width = self.sizes
        return ((count, 2 * width, hidden), self.gate_up), ((count, hidden, width), self.down)

    def expect(self, source: Kinds, site: Site) -> Expected:
        kinds = [one_kind(source, pieces) for _, pieces in self.matrices]
        self.form = _form(kinds)
        self.prepare(site)
        if not self.form:
            return plain_numbers(self.numel, self.dtype)
        fp4 = self.form == "NVFP4"
        total = self.numel // (2 if fp4 else 1)
        for kind, ((count, rows, columns), pieces) in zip(kinds, self.matrices, strict=True):
            parts = len(pieces) // count
            total += count * parts * scale_bytes(kind, rows // parts, columns)
            total += 4 * (
                count * parts if fp4 else rows
            )  # a factor a part, or whose scale is which
        return Expected(self.form, total)

    def load(self, checkpoint: Checkpoint, site: Site) -> None:
        kinds = [one_kind(checkpoint.source, pieces) for _, pieces in self.matrices]
        self.form = _form(kinds)
        if not self.form and any(map(_form, ([kind, kind] for kind in kinds))):
            log.info("%s and its down_proj are packed differently: unpacked", self.pieces[0].name)
        read = {"": _read_plain, "NVFP4": _read_nvfp4, "FP8": _read_fp8}[self.form]
        made: list[Tensor] = []
        for shape, pieces in self.matrices:
            made += read(checkpoint, shape, pieces, site)
        self.tensors = tuple(made)

    def fill(self, source: torch.Generator, site: Site) -> None:
        expected = {site.expected(piece.name.removesuffix(".weight")) for piece in self.pieces}
        self.form = _form([*expected, *expected]) if len(expected) == 1 else ""
        made: list[Tensor] = []
        for shape, pieces in self.matrices:
            spread = shape[2] ** -0.5
            if self.form == "NVFP4":
                made += random_nvfp4(*shape, source.device, source)
                size = (shape[0], 2) if pieces is self.gate_up else (shape[0],)
                made.append(torch.full(size, spread, device=source.device))
            elif self.form == "FP8":
                wide = -(-shape[2] // FP8_BLOCK) if expected == {"FP8_BLOCK"} else 1
                made += random_experts(shape, FP8_BLOCK if wide > 1 else 1, wide, source)
            else:
                plain = torch.empty(shape, dtype=self.dtype, device=source.device)
                made.append(plain.normal_(0, spread, generator=source))
        self.tensors = tuple(made)

    def prepare(self, site: Site) -> None:
        count, hidden, width = self.sizes
        need = {"dtype": self.dtype, "experts": count, "hidden": hidden, "width": width}
        self.route = site.routes.route(OPS[self.form], need)


def _form(kinds: list[str]) -> str:
    """What the kinds of gate and up, and of down, can be computed on together."""
    if set(kinds) == {"NVFP4"}:
        return "NVFP4"
    return "FP8" if all(kind.startswith("FP8_") for kind in kinds) else ""


Shape = tuple[int, int, int]


def _read_plain(
    checkpoint: Checkpoint, shape: Shape, pieces: tuple[Piece, ...], site: Site
) -> list[Tensor]:
    values = torch.empty(shape, dtype=site.dtype, device=site.device.torch_device)
    for piece in pieces:
        rows, columns = piece.cut
        part = checkpoint.read(piece.name, rows=rows, columns=columns, dtype=site.dtype)
        values[piece.into].copy_(part)
    return [values]


def _read_nvfp4(
    checkpoint: Checkpoint, shape: Shape, pieces: tuple[Piece, ...], site: Site
) -> list[Tensor]:
    """Gate and up keep a float32 scale each, since they may differ."""
    where = site.device.torch_device
    count, rows, columns = shape
    values = torch.empty(count, rows, columns // 2, dtype=torch.uint8, device=where)
    size = (count, rows, columns // NVFP4_BLOCK)
    scales = torch.empty(size, dtype=torch.float8_e4m3fn, device=where)
    factors = []
    for piece, part in _scaled(checkpoint, pieces):
        values[piece.into].copy_(part.values)
        scales[piece.into].copy_(part.scales)
        factors.append(part.of_row[0])
    by_expert = torch.stack(factors).view(count, -1).squeeze(1)
    return [values, scales, by_expert.to(where)]


def _read_fp8(
    checkpoint: Checkpoint, shape: Shape, pieces: tuple[Piece, ...], site: Site
) -> list[Tensor]:
    """An expert's scales are gate's, then up's; which row has which is the same in all experts."""
    where = site.device.torch_device
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=where)
    scales: list[list[Tensor]] = [[] for _ in range(shape[0])]
    of_row: list[Tensor] = []
    for piece, part in _scaled(checkpoint, pieces):
        values[piece.into].copy_(part.values)
        expert = piece.into[0]
        if expert == 0:
            of_row.append(part.of_row + sum(len(one) for one in scales[0]))
        scales[expert].append(part.scales)
    stacked = torch.stack([torch.cat(one) for one in scales])
    return [values, stacked.to(where), torch.cat(of_row).to(where)]


def _scaled(
    checkpoint: Checkpoint, pieces: tuple[Piece, ...]
) -> Iterator[tuple[Piece, ScaledTensor]]:
    for piece in pieces:
        rows, columns = piece.cut
        yield piece, checkpoint.read_scaled(piece.name, rows=rows, columns=columns)


class Experts:
    """`count` SwiGLU blocks [hidden -> width -> hidden] called `name`.0, `name`.1, ..."""

    def __init__(self, site: Site, name: str, hidden: int, width: int, count: int) -> None:
        self.weights = ExpertWeights(site, name, (hidden, width, count))
        site.add(self.weights)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights [T, k] float32, chosen [T, k] -> [T, hidden] of this rank's widths.

        The ranks' results add up to the layer's.
        """
        result: Tensor = self.weights.route(x, *self.weights.tensors, weights, chosen)
        return result
