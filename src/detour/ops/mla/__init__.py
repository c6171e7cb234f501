"""Multi-head latent attention in its absorbed form: sparse over chosen slots, dense over pages.

Queries are already multiplied by W_UK and rotated; what comes out still has to meet W_UV. Knows
the two latent rows of KVLayout; knows nothing of indexers or projections.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detour.ops.attention import make_batch
from detour.ops.batch import Batch
from detour.ops.device import Device
from detour.ops.kv_layout import LATENT_BLOCK, KVLayout, latent, latent_fp8_packed
from detour.ops.op import Need, op, takes

E4M3_LARGEST = 448.0
GATHERED = 4 << 20  # numbers of gathered rows that the reference holds at a time
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class LatentShape:
    """What the layers share. `scale` multiplies q @ k; rows hold rank + rope numbers."""

    heads: int
    rank: int
    rope: int
    scale: float
    layout: KVLayout


def rows_of(device: Device, need: Need) -> list[str]:
    """Why torch's own rows cannot be what is asked for."""
    found = takes("latent", "latent_fp8_packed")(device, need)
    rank = need["rank"]
    if need["layout"].name == "latent_fp8_packed" and rank > LATENT_BLOCK and rank % LATENT_BLOCK:
        found.append(f"packed rows have a rank of whole blocks of {LATENT_BLOCK}, not {rank}")
    return found


def pack_latent(rows: Tensor, rank: int) -> Tensor:
    """[..., rank + rope] floating -> [..., bytes] uint8 of layout latent_fp8_packed.

    A block's scale is its largest magnitude / 448 (1 where all are 0), an arbitrary float32.
    """
    numbers = rows[..., :rank].float()
    blocks = numbers.unflatten(-1, (-1, min(rank, LATENT_BLOCK)))
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / E4M3_LARGEST, torch.ones_like(largest))
    packed = (blocks / scales).to(torch.float8_e4m3fn).flatten(-2)
    rope = rows[..., rank:].to(torch.bfloat16).contiguous()
    parts = (packed, scales[..., 0].contiguous(), rope)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def unpack_latent(rows: Tensor, shape: LatentShape) -> Tensor:
    """Cache rows [..., width] of either latent layout -> [..., rank + rope] float32."""
    if shape.layout.name == "latent":
        return rows.float()
    blocks = -(-shape.rank // LATENT_BLOCK)
    packed, scales, rope = rows.split((shape.rank, 4 * blocks, 2 * shape.rope), dim=-1)
    numbers = packed.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (blocks, -1))
    numbers = numbers * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat([numbers.flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1)


def make_cache(
    slots: int, page_size: int, shape: LatentShape, device: torch.device, source: torch.Generator
) -> Tensor:
    """A cache [pages, page_size, width] of random rows, at least `slots` of them."""
    pages = -(-slots // page_size)
    size = (pages, page_size, shape.rank + shape.rope)
    rows = torch.randn(size, generator=source, device=source.device).to(device)
    if shape.layout.name == "latent":
        return rows.to(shape.layout.dtype)
    rows *= 0.5 + 3 * torch.rand(pages, page_size, 1, generator=source, device=source.device).to(
        device
    )
    return pack_latent(rows, shape.rank)


def _shapes(device: torch.device) -> Iterator[tuple[Need, LatentShape, torch.dtype]]:
    kinds = [(torch.float32, latent(torch.float32, 64, 16), 4, 64, 16)]
    kinds += [(torch.float16, latent_fp8_packed(128, 16), 8, 128, 16)]
    kinds += [(torch.bfloat16, latent_fp8_packed(512, 64), 8, 512, 64)]
    kinds += [(torch.float32, latent(torch.bfloat16, 64, 16), 4, 64, 16)]
    if device.type == "cuda":
        kinds += [(torch.bfloat16, latent(torch.bfloat16, 512, 64), 8, 512, 64)]
    for dtype, layout, heads, rank, rope in kinds:
        shape = LatentShape(heads, rank, rope, (rank + rope) ** -0.5, layout)
        need = {"dtype": dtype, "heads": heads, "rank": rank, "rope": rope, "layout": layout}
        yield need, shape, dtype


def _sparse_inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(31)
    counts = ((1, 8, [5]), (5, 96, [96, 1, 0, 33, 64]))
    if device.type == "cuda":
        counts += ((40, 2048, [2048, 1500, 17, 2047, 640] * 8),)
    for need, shape, dtype in _shapes(device):
        for tokens, width, lengths in counts:
            cache = make_cache(3 * width + 64, 64, shape, device, source)
            q = torch.randn(tokens, shape.heads, shape.rank + shape.rope, generator=source)
            total = cache.shape[0] * cache.shape[1]
            slots = torch.full((tokens, width), -1, dtype=torch.int32)
            for token, length in enumerate(lengths):
                slots[token, :length] = torch.randperm(total, generator=source)[:length].int()
            count = torch.tensor(lengths, dtype=torch.int32, device=device)
            yield need, (2 * q.to(device, dtype), cache, slots.to(device), count, shape)


@op(__name__, inputs=_sparse_inputs, tolerance=TOLERANCE, replays=False, reasons=rows_of)
def sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, shape: LatentShape
) -> Tensor:
    """softmax(scale * q @ rows) @ rows[:rank] over each token's own slots -> [T, heads, rank].

    q       [T, heads, rank + rope] floating, contiguous; absorbed, its rope part rotated
    cache   [pages, page_size, width] contiguous, layout latent or latent_fp8_packed
    slots   [T, k] int32 cache slots; the first counts[t] are valid and distinct, the rest -1
    counts  [T] int32, 0 allowed (the token's output is then 0)

    Softmax in float32. DeepSeek-V3.2's sparse attention (arXiv 2512.02556), absorbed MLA as in
    DeepSeek-V2 (arXiv 2405.04434). A need is {"dtype", "heads", "rank", "rope", "layout"}.
    """
    rows = cache.view(-1, cache.shape[-1])
    out = torch.zeros(*q.shape[:2], shape.rank, dtype=q.dtype, device=q.device)
    width = int(counts.max()) if len(counts) else 0
    place = torch.arange(width, device=q.device)
    step = max(1, GATHERED // max(1, width * (shape.rank + shape.rope)))
    for first in range(0, len(q) if width else 0, step):
        some = slice(first, first + step)
        own = slots[some, :width].long()
        beyond = place >= counts[some, None]
        # What lies where padding would point may be NaN, so it points to the token's first row.
        keys = unpack_latent(rows[torch.where(beyond, own[:, :1], own).clamp_(min=0)], shape)
        out[some] = attend(q[some], keys, beyond, shape)
    return out.masked_fill_((counts == 0)[:, None, None], 0)


def attend(q: Tensor, keys: Tensor, beyond: Tensor, shape: LatentShape) -> Tensor:
    """q [B, heads, rank + rope] over keys [B, L, rank + rope] float32, all finite.

    beyond [B, L]: keys that a token does not see. -> [B, heads, rank] of q's dtype
    """
    scores = torch.bmm(q.float(), keys.transpose(1, 2)).mul_(shape.scale)
    weights = scores.masked_fill_(beyond[:, None], -torch.inf).softmax(dim=-1)
    return torch.bmm(weights, keys[..., : shape.rank]).to(q.dtype)


MIXES = ([(0, 1)], [(37, 1), (0, 5), (3, 2), (63, 1), (16, 9), (64, 1)])


def _dense_inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(33)
    mixes = MIXES
    if device.type == "cuda":
        mixes += ([(0, 300), (1000, 200), (1536, 1)], [(100 * row, 1) for row in range(20)])
    for need, shape, dtype in _shapes(device):
        for rows in mixes:
            batch = make_batch(rows, 16, device, source)
            cache = make_cache((int(batch.page_table.max()) + 1) * 16, 16, shape, device, source)
            q = torch.randn(len(batch.positions), shape.heads, shape.rank + shape.rope)
            yield need, (batch, shape, 2 * q.to(device, dtype), cache)


@dataclass(frozen=True)
class DensePlan:
    """The reference's plan: each token's cache slots, padded as sparse_mla takes them."""

    shape: LatentShape
    slots: Tensor  # [T, longest] int32
    counts: Tensor  # [T] int32


def plan_dense(batch: Batch, shape: LatentShape) -> DensePlan:
    place = torch.arange(int(batch.lengths.max()), device=batch.page_table.device)
    pages = batch.page_table[batch.row_of_token][:, place // batch.page_size]
    slots = (pages * batch.page_size + place % batch.page_size).int()
    counts = (batch.positions + 1).int()
    return DensePlan(shape, slots.masked_fill_(place >= counts[:, None], -1), counts)


@op(
    __name__,
    inputs=_dense_inputs,
    tolerance=TOLERANCE,
    plan=plan_dense,
    planned=2,
    replays=False,
    reasons=rows_of,
)
def dense_mla(plan: Any, q: Tensor, cache: Tensor) -> Tensor:
    """As sparse_mla over every position [0, positions[t]] of the token's row -> [T, heads, rank].

    plan(batch: Batch, shape: LatentShape) is called once a step; q and cache as sparse_mla's, this
    step's rows already written. Rows beyond a sequence's length hold anything, NaN included.
    """
    return sparse_mla.reference.run(q, cache, plan.slots, plan.counts, plan.shape)
