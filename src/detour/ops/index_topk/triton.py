"""Triton backend of index_topk: a binary search for the k-th largest score, scores in registers.

A row of up to SEGMENT scores is one program's: it holds the scores as ordered integers, finds the
k-th largest bit by bit (a count over the row each time, at most 32), and writes what lies above it
and the first of what equals it. Longer rows are cut into segments whose own best k are candidates
for a second launch. No sort, no atomics: the same set every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device, probe
from detour.ops.index_topk import index_topk
from detour.ops.op import Need
from detour.ops.triton_device import triton_reasons

SEGMENT = 32768
SMALL_SEGMENT = 8192  # where there are too few rows to keep the device busy


@triton.jit
def ordered(scores):
    """Integers that compare as the scores do; 0.0 and -0.0 alike, 0 below all of them."""
    bits = (scores + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def threshold(keys, top_k):
    """(t, c): at least top_k keys are >= t > 0; c of them are. Ends early once exactly top_k are."""
    found = tl.zeros((), tl.uint32)
    count = tl.full((), 2147483647, tl.int32)
    bit = 31
    while (bit >= 0) & (count != top_k):
        trial = found | (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))
        above = tl.sum((keys >= trial).to(tl.int32), 0)
        take = above >= top_k
        found = tl.where(take, trial, found)
        count = tl.where(take, above, count)
        bit -= 1
    return found


@triton.jit
def select(
    scores, positions, lengths, row_of_token, table, slots, counts, best, best_at,
    columns, table_stride, top_k, parts,
    BLOCK: tl.constexpr, TOP_P: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """One segment of one token's scores. FIRST reads scores, else candidates of `parts` segments;
    LAST writes slots, else candidates (ordered keys and positions, 0 and -1 where there are none)."""
    token = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    length = tl.load(lengths + token)
    at = tl.arange(0, BLOCK)
    if LAST:
        row = tl.load(row_of_token + token)
        places = table + row * table_stride
        tl.store(counts + token, tl.minimum(length, top_k))
        if length <= top_k:
            j = tl.arange(0, TOP_P)
            page = tl.load(places + j // PAGE, mask=j < length, other=0)
            slot = tl.where(j < length, page * PAGE + j % PAGE, -1)
            tl.store(slots + token * top_k + j, slot, mask=j < top_k)
            return
    if FIRST:
        where = segment * BLOCK + at
        inside = where < length
        keys = ordered(tl.load(scores + token * columns + where, mask=inside, other=0.0))
        keys = tl.where(inside, keys, 0)
        have = tl.minimum(tl.maximum(length - segment * BLOCK, 0), BLOCK)
    else:
        inside = at < parts * top_k
        keys = tl.load(best + token * parts * top_k + at, mask=inside, other=0)
        where = tl.load(best_at + token * parts * top_k + at, mask=inside, other=-1)
        have = tl.minimum(length, parts * top_k)
    wanted = tl.minimum(top_k, have)
    level = tl.zeros((), tl.uint32)
    if have > wanted:
        level = threshold(keys, wanted)
    higher = (keys > level).to(tl.int32)
    equal = ((keys == level) & (keys > 0)).to(tl.int32)
    # both counts in one scan: a segment holds fewer than 2 ** 16 of either
    scanned = tl.cumsum(higher + (equal << 16), 0)
    spare = wanted - tl.sum(higher, 0)
    above_before = (scanned & 0xFFFF) - higher
    equal_before = ((scanned >> 16) & 0xFFFF) - equal
    chosen = (higher == 1) | ((equal == 1) & (equal_before < spare))
    place = above_before + tl.minimum(equal_before, spare)
    if LAST:
        page = tl.load(places + where // PAGE, mask=chosen, other=0)
        tl.store(slots + token * top_k + place, page * PAGE + where % PAGE, mask=chosen)
    else:
        base = (token * parts + segment) * top_k
        tl.store(best + base + place, keys, mask=chosen)
        tl.store(best_at + base + place, where, mask=chosen)
        j = tl.arange(0, TOP_P)
        rest = (j >= wanted) & (j < top_k)
        tl.store(best + base + j, tl.zeros((TOP_P,), tl.uint32), mask=rest)
        tl.store(best_at + base + j, tl.full((TOP_P,), -1, tl.int32), mask=rest)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    if need["top_k"] > 4096:
        found.append(f"top-k {need['top_k']} is more than 4096")
    return found


def launch(
    segment: int, scores: Tensor, lengths: Tensor, row_of_token: Tensor, page_table: Tensor,
    page_size: int, top_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, columns = scores.shape
    device = scores.device
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    parts = max(1, triton.cdiv(columns, segment))
    size = (tokens, parts if parts > 1 else 0, top_k)
    best = torch.empty(size, dtype=torch.uint32, device=device)
    best_at = torch.empty(size, dtype=torch.int32, device=device)
    top_p = triton.next_power_of_2(top_k)

    def go(block: int, segments: int, first: bool, last: bool) -> None:
        select[(tokens, segments)](
            scores, best_at, lengths, row_of_token, page_table, slots, counts, best, best_at,
            columns, page_table.stride(0), top_k, parts,
            BLOCK=block, TOP_P=top_p, PAGE=page_size, FIRST=first, LAST=last,
            num_warps=min(32, max(4, block // 1024)),
        )  # fmt: skip

    if not tokens:
        return slots, counts
    if parts == 1:
        go(max(32, triton.next_power_of_2(columns)), 1, True, True)
    else:
        go(segment, parts, True, False)
        go(triton.next_power_of_2(parts * top_k), 1, False, True)
    return slots, counts


@index_topk.backend("triton", reasons=reasons, rank=10)
def run(
    scores: Tensor,
    lengths: Tensor,
    row_of_token: Tensor,
    page_table: Tensor,
    page_size: int,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    tokens, columns = scores.shape
    pieces = triton.cdiv(columns, SMALL_SEGMENT)
    spare = tokens * pieces <= 4 * probe(str(scores.device)).multiprocessors
    segment = SMALL_SEGMENT if spare and pieces * top_k <= SEGMENT else SEGMENT
    return launch(segment, scores, lengths, row_of_token, page_table, page_size, top_k)
