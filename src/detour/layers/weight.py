"""Parameters that know the checkpoint tensors they are made of, this rank's share, their packing.

Knows no model. Nothing is allocated before it is loaded, so shapes can be listed for free.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from detour.errors import CheckpointError
from detour.layers.even_routing import EvenRouting
from detour.loading.checkpoint import Checkpoint
from detour.loading.tensors import return_freed_memory
from detour.ops.device import Device
from detour.ops.gemm import GROUP, GROUP_BYTES, SCALED, PackedWeight, dense, gemm
from detour.ops.gemm_scaled import gemm_scaled, random_scaled, scale_bytes
from detour.ops.route import Route, Routes
from detour.parallel.group import WHOLE, Group, Share

log = logging.getLogger(__name__)

Index = tuple[int | slice, ...]
LARGE = 1 << 18  # numbers of a parameter whose loading leaves memory worth giving back


class Kinds(Protocol):
    """How tensors lie in a checkpoint that may not be there yet: a TensorSource is one."""

    def kind(self, name: str) -> str: ...


class Expected(NamedTuple):
    """What a parameter will be once it is loaded."""

    form: str  # a packing, or the dtype of plain numbers
    nbytes: int  # on the device


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and where this rank's share of it lies in a parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as in the checkpoint
    rows: Share = WHOLE  # of its first dimension
    columns: Share = WHOLE  # of its second
    into: Index = ()  # the part of the parameter it fills; () = all

    @property
    def cut(self) -> tuple[slice, slice]:
        """Rows and columns this rank reads."""
        columns = self.columns.of(self.shape[1]) if len(self.shape) > 1 else slice(None)
        return self.rows.of(self.shape[0]), columns


class Parameter:
    """A plain tensor made of pieces. `value` is empty until it is loaded."""

    def __init__(
        self, shape: tuple[int, ...], pieces: tuple[Piece, ...], dtype: torch.dtype, spread: float
    ) -> None:
        self.shape = shape
        self.pieces = pieces
        self.dtype = dtype
        self.spread = spread  # dummy weights: standard deviation; < 0 = all ones
        self.value = torch.empty(0, dtype=dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the device."""
        return self.value.nbytes

    def expect(self, source: Kinds, site: "Site") -> Expected:
        """What loading will make of it. Asks for the routes that will be asked for; allocates
        nothing."""
        return plain_numbers(self.numel, self.dtype)

    def load(self, checkpoint: Checkpoint, site: "Site") -> None:
        self.value = self._read(checkpoint, site, self.dtype)

    def _read(self, checkpoint: Checkpoint, site: "Site", dtype: torch.dtype) -> Tensor:
        value = torch.empty(self.shape, dtype=dtype, device=site.device.torch_device)
        for piece in self.pieces:
            rows, columns = piece.cut
            value[piece.into].copy_(
                checkpoint.read(piece.name, rows=rows, columns=columns, dtype=dtype)
            )
        return value

    def fill(self, source: torch.Generator, site: "Site") -> None:
        """Random values (dummy weights)."""
        self.value = torch.empty(self.shape, dtype=self.dtype, device=site.device.torch_device)
        if self.spread < 0:
            self.value.fill_(1)
        else:
            self.value.normal_(0, self.spread, generator=source)

    def prepare(self, site: "Site") -> None:
        """Called once everything it is made of is there."""


class Matrix(Parameter):
    """The weight of a linear layer, in the packing its checkpoint has where a gemm can use that.

    Once prepared, `prepared` is what the route's current backend computes on. The weight itself is
    kept only where it is the same memory, or `keep` says that somebody else reads it.
    """

    def __init__(
        self, shape: tuple[int, ...], pieces: tuple[Piece, ...], dtype: torch.dtype, keep: bool
    ) -> None:
        super().__init__(shape, pieces, dtype, shape[1] ** -0.5)
        self.keep = keep
        self.weight = dense(self.value.view(0, 0))
        self.prepared: Any = self.weight
        self.stored = 0  # bytes of the weight as it was loaded
        self.route: Route

    @property
    def nbytes(self) -> int:
        return self.stored

    def expect(self, source: Kinds, site: "Site") -> Expected:
        packing, stored = self._form(source, site)
        site.gemm_route(packing, stored, self.shape, self.dtype)
        if packing == "dense":
            return plain_numbers(self.numel, stored)
        if packing in SCALED:
            return Expected(packing, self._scaled_bytes(packing))
        return Expected(packing, self.numel // GROUP * GROUP_BYTES[packing])

    def _scaled_bytes(self, packing: str) -> int:
        """Values, each piece's own scales, and which of them each row has (or NVFP4's factor)."""
        rows, columns = self.shape
        total = self.numel // (2 if packing == "NVFP4" else 1) + 4 * rows
        for piece in self.pieces:
            total += scale_bytes(packing, piece.shape[0] // piece.rows.parts, columns)
        return total

    def load(self, checkpoint: Checkpoint, site: "Site") -> None:
        packing, stored = self._form(checkpoint.source, site)
        if packing == "dense":
            self.weight = dense(self._read(checkpoint, site, stored))
            return
        if packing in SCALED:
            self.weight = self._read_scaled(packing, checkpoint, site)
            return
        rows, columns = self.shape
        row_bytes = columns // GROUP * GROUP_BYTES[packing]
        blocks = torch.empty(rows, row_bytes, dtype=torch.uint8, device=site.device.torch_device)
        for piece in self.pieces:
            packed = checkpoint.read_packed(piece.name, rows=piece.cut[0])
            blocks[piece.into].copy_(torch.from_numpy(packed.data))
        self.weight = PackedWeight(packing, rows, columns, (blocks,))

    def _read_scaled(self, packing: str, checkpoint: Checkpoint, site: "Site") -> PackedWeight:
        """The pieces' values one below the other, each with its own scales."""
        where = site.device.torch_device
        values, others, scales, scale_count = torch.empty(0), [], [], 0
        for piece in self.pieces:
            rows, columns = piece.cut
            part = checkpoint.read_scaled(piece.name, rows=rows, columns=columns)
            if not len(values):
                shape = (self.shape[0], part.values.shape[1])
                values = torch.empty(shape, dtype=part.values.dtype, device=where)
            values[piece.into].copy_(part.values)
            scales.append(part.scales)
            others.append(part.of_row if packing == "NVFP4" else part.of_row + scale_count)
            scale_count += len(part.scales)
        rest = (torch.cat(parts).to(where) for parts in (scales, others))
        return PackedWeight(packing, *self.shape, (values, *rest))

    def fill(self, source: torch.Generator, site: "Site") -> None:
        kinds = {site.expected(piece.name.removesuffix(".weight")) for piece in self.pieces}
        kind = kinds.pop()
        if kind in SCALED and not kinds and not self.shape[1] % 16:
            self.weight = random_scaled(kind, *self.shape, source)
            return
        super().fill(source, site)
        self.weight = dense(self.value)
        self.value = torch.empty(0, dtype=self.dtype)

    def prepare(self, site: "Site") -> None:
        """Choose the backend and let it arrange the weight."""
        stored = self.weight.tensors[0].dtype
        self.route = site.gemm_route(self.weight.packing, stored, self.shape, self.dtype)
        self.stored = sum(tensor.nbytes for tensor in self.weight.tensors)
        self.prepared = self.route.plan(self.weight)
        if self.prepared is not self.weight and not self.keep:
            self.weight = dense(self.value.view(0, 0))

    def _form(self, source: Kinds, site: "Site") -> tuple[str, torch.dtype]:
        """Packing and dtype to keep it in: the file's, if its pieces agree and a backend can."""
        kind = one_kind(source, self.pieces)
        whole = all(piece.columns.parts == 1 for piece in self.pieces)
        if kind in SCALED:
            return kind, torch.uint8
        if kind in GROUP_BYTES and whole:
            form = (kind, torch.uint8)
        elif kind == "BF16":
            form = ("dense", torch.bfloat16)
        else:
            form = ("dense", self.dtype)
        route = site.gemm_route(*form, self.shape, self.dtype)
        return ("dense", self.dtype) if route.current is route.op.reference else form


def plain_numbers(count: int, dtype: torch.dtype) -> Expected:
    return Expected(str(dtype).removeprefix("torch."), count * dtype.itemsize)


def one_kind(source: Kinds, pieces: tuple[Piece, ...]) -> str:
    """How the pieces lie in the checkpoint, if all lie alike, else ""."""
    kinds = {source.kind(piece.name) for piece in pieces}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds.intersection(SCALED):
        log.info(
            "%s and what is fused with it are packed in different ways (%s): they are unpacked",
            pieces[0].name,
            ", ".join(sorted(kinds)),
        )
    return ""


def nothing_packed(module: str) -> str:
    return ""


@dataclass(frozen=True)
class Site:
    """Where a model is built: what its layers need to know, and the list of their parameters.

    expected: a module's name to the packing ("" = none) that dummy weights of it get.
    even_routing: tokens go to experts drawn evenly; `routers` are the layers' draws.
    """

    device: Device
    dtype: torch.dtype
    routes: Routes
    group: Group = Group()
    parameters: list[Parameter] = field(default_factory=list)
    expected: Callable[[str], str] = nothing_packed
    even_routing: bool = False
    routers: list[EvenRouting] = field(default_factory=list)

    def tensor(self, shape: tuple[int, ...], *pieces: Piece, spread: float = -1.0) -> Parameter:
        """A new parameter; `spread` is the standard deviation of dummy values, < 0 = ones."""
        return self.add(Parameter(shape, pieces, self.dtype, spread))

    def matrix(self, shape: tuple[int, int], *pieces: Piece, keep: bool = False) -> Matrix:
        matrix = Matrix(shape, pieces, self.dtype, keep)
        self.add(matrix)
        return matrix

    def add(self, parameter: Parameter) -> Parameter:
        self.parameters.append(parameter)
        return parameter

    def gemm_route(
        self, packing: str, stored: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Route:
        need = {"packing": packing, "dtype": dtype, "rows": shape[0], "columns": shape[1]}
        if packing in SCALED:
            return self.routes.route(gemm_scaled, need)
        return self.routes.route(gemm, {**need, "stored": stored})

    def pieces(self) -> Iterator[Piece]:
        for parameter in self.parameters:
            yield from parameter.pieces

    def load(
        self,
        checkpoint: Checkpoint,
        ignored: Callable[[str], bool],
        advance: Callable[[int], None],
    ) -> None:
        """Read every parameter, one tensor at a time, in the order of the files.

        `ignored(name)` says of a checkpoint tensor without a place here whether that is right;
        `advance(numbers)` is told of progress. Raises CheckpointError naming tensors that are
        missing, unexpected or of another shape, before anything is read.
        """
        names = list(checkpoint.names)
        order = {name: place for place, name in enumerate(names)}
        self._check(checkpoint, order, ignored)
        for parameter in sorted(self.parameters, key=lambda one: order[one.pieces[0].name]):
            parameter.load(checkpoint, self)
            parameter.prepare(self)
            if parameter.numel > LARGE:
                return_freed_memory()
            advance(parameter.numel)

    def _check(
        self, checkpoint: Checkpoint, order: dict[str, int], ignored: Callable[[str], bool]
    ) -> None:
        wanted = {piece.name: piece for piece in self.pieces()}
        missing = [name for name in wanted if name not in order]
        if missing:
            raise CheckpointError(
                f"{checkpoint.path} lacks {_some(missing)}, which its configuration asks for."
            )
        surplus = [name for name in order if name not in wanted and not ignored(name)]
        if surplus:
            raise CheckpointError(
                f"{checkpoint.path} holds {_some(surplus)}, unknown to its configuration."
            )
        for name, piece in wanted.items():
            shape = tuple(checkpoint.shape(name))
            if shape != piece.shape:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name} has shape {list(shape)}, but the "
                    f"configuration asks for {list(piece.shape)}."
                )

    def fill(self, seed: int, advance: Callable[[int], None]) -> None:
        """Dummy weights: random values of sane scale, the same for one seed and device kind."""
        source = torch.Generator(self.device.torch_device).manual_seed(seed)
        for parameter in self.parameters:
            parameter.fill(source, self)
            parameter.prepare(self)
            advance(parameter.numel)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    what = "the tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"{what} {shown}" if len(names) <= 3 else f"{what} ({shown}, …)"


def empty(site: Site) -> Tensor:
    """No bias."""
    return torch.empty(0, dtype=site.dtype, device=site.device.torch_device)
