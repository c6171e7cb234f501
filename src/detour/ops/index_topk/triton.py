"""Triton backend of index_topk: a search for the k-th largest score, scores in registers.

A row of up to Cut.segment scores is one program's: it holds the scores as ordered integers, finds the
k-th largest by counting the row against one guess after the other, and writes what lies above it
and the first of what equals it. Longer rows are cut into segments whose own best k
are candidates for a second launch. No sort, no atomics: the same set every time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.index_topk import index_topk
from detour.ops.op import Need
from detour.ops.triton_device import triton_reasons


@dataclass(frozen=True)
class Cut:
    """How rows are shared out: scores a program holds, how many it writes at a time, and how many
    a warp holds (of 32 lanes)."""

    segment: int = 16384
    chunk: int = 4096
    warp: int = 1024


NONE: tl.constexpr = tl.constexpr(-2147483648)  # below the key of every score


@triton.jit
def ordered(scores):
    """int32 keys that compare as the scores do; 0.0 and -0.0 alike."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def threshold(keys, top_k, have):
    """t: fewer than top_k keys are above it, at least top_k are not below it.

    The range [low, high) of t shrinks by interpolation on the counts at its ends, by halves every
    third step; it ends where exactly top_k keys are >= low, or (ties) where low is a key that the
    top_k-th equals. About 13 counts for continuous scores, where halving alone takes 22.
    """
    low = tl.min(tl.where(keys == NONE, 2147483647, keys), 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64) + 1
    at_low = have
    at_high = have * 0
    step = have * 0
    while (high - low > 1) & (at_low != top_k):
        step += 1
        part = (at_low - top_k + 0.5) / (at_low - at_high).to(tl.float32)
        part = tl.where(step % 3 == 0, 0.5, part)
        trial = low + ((high - low).to(tl.float32) * part).to(tl.int64)
        trial = tl.minimum(tl.maximum(trial, low + 1), high - 1)
        count = tl.sum((keys >= trial.to(tl.int32)).to(tl.int32), 0)
        take = count >= top_k
        low = tl.where(take, trial, low)
        at_low = tl.where(take, count, at_low)
        high = tl.where(take, high, trial)
        at_high = tl.where(take, at_high, count)
        if step % 8 == 0:
            least = tl.min(tl.where(keys >= low.to(tl.int32), keys, 2147483647), 0)
            above = tl.sum((keys > least).to(tl.int32), 0)
            low = least.to(tl.int64)
            high = tl.where(above < top_k, low + 1, high)
    return low.to(tl.int32)


@triton.jit
def read_keys(
    scores, best, token, begin, end, stride, COUNT: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Keys [begin, begin + COUNT) of the row's scores (FIRST) or candidates, of which `end` count."""
    at = begin + tl.arange(0, COUNT)
    inside = at < end
    if FIRST:
        keys = ordered(tl.load(scores + token * stride + at, mask=inside, other=0.0))
        return tl.where(inside, keys, NONE)
    return tl.load(best + token * stride + at, mask=inside, other=NONE)


@triton.jit
def select(
    scores, positions, lengths, row_of_token, table, slots, counts, best, best_at,
    columns, table_stride, top_k, parts,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, TOP_P: tl.constexpr,
    PAGE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One segment of one token's scores. FIRST reads scores, else candidates of `parts` segments;
    LAST writes slots, else candidates (keys and positions, NONE and -1 where there are none).
    A row that lies in the first segment, however many there are, is done with by FIRST.

    All keys are held while their level is searched, then read again, CHUNK at a time, so that a
    thread's registers hold no more than its keys."""
    token = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    length = tl.load(lengths + token)
    places = table + tl.load(row_of_token + token) * table_stride
    if LAST:
        tl.store(counts + token, tl.minimum(length, top_k))
        if length <= top_k:
            j = tl.arange(0, TOP_P)
            page = tl.load(places + j // PAGE, mask=j < length, other=0)
            slot = tl.where(j < length, page * PAGE + j % PAGE, -1)
            tl.store(slots + token * top_k + j, slot, mask=j < top_k)
            return
        if not FIRST and length <= SEGMENT:
            return
    elif (length <= top_k) | (length <= segment * BLOCK):
        return
    alone = length <= SEGMENT
    begin = segment * BLOCK
    if FIRST:
        end = tl.minimum(length, begin + BLOCK)
        stride = columns
        have = end - begin
    else:
        end = tl.cdiv(length, SEGMENT) * top_k
        stride = parts * top_k
        have = tl.minimum(length, end)
    wanted = tl.minimum(top_k, have)
    level = wanted * 0 + NONE
    spare = wanted * 0
    if have > wanted:
        keys = read_keys(scores, best, token, begin, end, stride, BLOCK, FIRST)
        level = threshold(keys, wanted, have)
        spare = wanted - tl.sum((keys > level).to(tl.int32), 0)  # of those that equal the level
    before = wanted * 0  # chosen so far
    alike = wanted * 0  # of them, or passed over: those that equal the level
    for first in range(begin, end, CHUNK):
        keys = read_keys(scores, best, token, first, end, stride, CHUNK, FIRST)
        at = first + tl.arange(0, CHUNK)
        higher = (keys > level).to(tl.int32)
        equal = ((keys == level) & (keys != NONE)).to(tl.int32)
        # both counts in one scan: a segment holds fewer than 2 ** 16 of either
        scanned = tl.cumsum(higher + (equal << 16), 0)
        sums = tl.sum(higher + (equal << 16), 0)
        above = (scanned & 0xFFFF) - higher
        same = ((scanned >> 16) & 0xFFFF) - equal + alike
        chosen = (higher == 1) | ((equal == 1) & (same < spare))
        place = before + above + tl.minimum(same, spare) - tl.minimum(alike, spare)
        before += (sums & 0xFFFF) + tl.minimum(alike + ((sums >> 16) & 0xFFFF), spare)
        before -= tl.minimum(alike, spare)
        alike += (sums >> 16) & 0xFFFF
        where = at
        if not FIRST:
            where = tl.load(positions + token * stride + at, mask=chosen, other=0)
        if LAST or alone:
            page = tl.load(places + where // PAGE, mask=chosen, other=0)
            tl.store(slots + token * top_k + place, page * PAGE + where % PAGE, mask=chosen)
        else:
            base = (token * parts + segment) * top_k
            tl.store(best + base + place, keys, mask=chosen)
            tl.store(best_at + base + place, where, mask=chosen)
    if not LAST and not alone:
        base = (token * parts + segment) * top_k
        j = tl.arange(0, TOP_P)
        rest = (j >= wanted) & (j < top_k)
        tl.store(best + base + j, tl.full((TOP_P,), NONE, tl.int32), mask=rest)
        tl.store(best_at + base + j, tl.full((TOP_P,), -1, tl.int32), mask=rest)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    if need["top_k"] > 4096:
        found.append(f"top-k {need['top_k']} is more than 4096")
    return found


def choose_cut(columns: int) -> Cut:
    """As measured on an H200: a short row is written at one go, a long one in pieces of 16k."""
    return Cut(chunk=8192) if columns <= 8192 else Cut()


def launch(
    cut: Cut, scores: Tensor, lengths: Tensor, row_of_token: Tensor, page_table: Tensor,
    page_size: int, top_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, columns = scores.shape
    device = scores.device
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    counts = torch.empty(tokens, dtype=torch.int32, device=device)
    parts = max(1, triton.cdiv(columns, cut.segment))
    size = (tokens, parts if parts > 1 else 0, top_k)
    best = torch.empty(size, dtype=torch.int32, device=device)
    best_at = torch.empty(size, dtype=torch.int32, device=device)
    top_p = triton.next_power_of_2(top_k)

    def go(block: int, segments: int, first: bool, last: bool) -> None:
        select[(tokens, segments)](
            scores, best_at, lengths, row_of_token, page_table, slots, counts, best, best_at,
            columns, page_table.stride(0), top_k, parts,
            BLOCK=block, CHUNK=min(block, cut.chunk), SEGMENT=block if first else cut.segment,
            TOP_P=top_p, PAGE=page_size, FIRST=first, LAST=last,
            num_warps=min(32, max(4, block // cut.warp)),
        )  # fmt: skip

    if not tokens:
        return slots, counts
    if parts == 1:
        go(max(32, triton.next_power_of_2(columns)), 1, True, True)
    else:
        go(cut.segment, parts, True, False)
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
    return launch(
        choose_cut(scores.shape[1]), scores, lengths, row_of_token, page_table, page_size, top_k
    )
