"""Triton backends of greedy and draw: no sort, no gather, no copy of the logits.

Where a row has a top_k or a top_p, one program searches the smallest logit that passes them, by
counts and by masses of what lies above one guess after the other. The vocabulary is then scored in
slices, each a program, whose winners a last launch compares.

A token's weight is taken in float32 and sums in float64, where the reference has float64 throughout:
a token that ends a top_p may be in or out where the sums meet within 1e-7 of each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from detour.ops.device import Device, probe
from detour.ops.op import Need
from detour.ops.sampling import draw, greedy
from detour.ops.triton_device import interprets, triton_reasons

SLICE = 4096  # tokens of a slice, at least
SCAN = 4096  # tokens a search looks at in one go
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def mix64(number):
    """The finaliser of splitmix64; see noise.py for this and what follows."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return number ^ (number >> 31)


@triton.jit
def row_key(seeds, positions, row):
    """The row's 64 bits, low and high half."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = mix64(mix64(seed + golden) + position * golden)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, token, EXACT: tl.constexpr):
    spread = token.to(tl.uint32) * 0x9E3779B9
    spread = (spread ^ (spread >> 16)) * 0x85EBCA6B
    spread = (spread ^ (spread >> 13)) * 0xC2B2AE35
    number = spread ^ (spread >> 16) ^ low
    number = (number ^ (number >> 16)) * 0x7FEB352D + high
    number = (number ^ (number >> 15)) * 0x846CA68B
    number = (number ^ (number >> 16)) & 0x7FFFFFFF
    uniform = (number.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    uniform = tl.minimum(uniform, 0.99999994039535522)  # 1 - 2 ** -24
    if EXACT:  # the interpreter has no library of the device
        inner = tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32)
        return -tl.log(-inner)
    return -libdevice.log(-libdevice.log1p(-uniform))


@triton.jit
def score(
    logits, temperature, floors, seeds, positions, best, best_at, finite,
    vocab, width, slices,
    SLICE: tl.constexpr, DRAW: tl.constexpr, FLOORS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The winner of one slice of `width` tokens of a row; without DRAW, whether all are finite."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    most = tl.full((SLICE,), float("-inf"), tl.float32)
    place = tl.full((SLICE,), NO_TOKEN, tl.int32)
    odd = tl.zeros((SLICE,), tl.int32)
    if DRAW:
        heat = tl.load(temperature + row)
        low, high = row_key(seeds, positions, row)
    if FLOORS:
        floor = tl.load(floors + row)
    for start in range(0, width, SLICE):
        token = first + start + tl.arange(0, SLICE)
        inside = token < tl.minimum(vocab, first + width)
        value = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
        if DRAW:
            value = tl.div_rn(value, tl.full((SLICE,), 0.0, tl.float32) + heat)
            if FLOORS:
                value = tl.where(value < floor, float("-inf"), value)
            value = value + gumbel(low, high, token, EXACT)
        else:
            odd |= (inside & ~(tl.abs(value) < float("inf"))).to(tl.int32)
        better = inside & ((value > most) | (place == NO_TOKEN))
        most = tl.where(better, value, most)
        place = tl.where(better, token, place)
    top = tl.max(most, 0)
    part = row * slices + tl.program_id(1)
    tl.store(best + part, top)
    # of equal ones the lowest token; where NaN is about, any of the slice
    winner = tl.min(tl.where(most == top, place, NO_TOKEN), 0)
    tl.store(best_at + part, tl.minimum(winner, tl.min(place, 0) + width))
    if not DRAW:
        tl.store(finite + part, 1 - tl.max(odd, 0))


@triton.jit
def pick(
    best, best_at, finite, tokens, all_finite, vocab, slices,
    SLICES: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """The best of a row's slices."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    inside = part < slices
    value = tl.load(best + row * slices + part, mask=inside, other=float("-inf"))
    place = tl.load(best_at + row * slices + part, mask=inside, other=NO_TOKEN)
    top = tl.max(value, 0)
    winner = tl.min(tl.where(value == top, place, NO_TOKEN), 0)
    tl.store(tokens + row, tl.minimum(winner, vocab - 1).to(tl.int64))
    if not DRAW:
        fine = tl.load(finite + row * slices + part, mask=inside, other=1)
        tl.store(all_finite + row, tl.min(fine, 0) == 1)


@triton.jit
def key_of(value):
    """int64 that compare as the floats do; 0.0 and -0.0 alike."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(value, heat, highest, EXACT: tl.constexpr):
    """exp of the tempered logit less the highest one, rounded where the reference rounds."""
    power = tl.div_rn(value, tl.where(value > 0.0, heat, heat)) - highest
    return tl.exp(power) if EXACT else libdevice.exp(power)


@triton.jit
def read(base, start, vocab, SCAN: tl.constexpr):
    at = start + tl.arange(0, SCAN)
    return tl.load(base + at, mask=at < vocab, other=float("-inf"))


@triton.jit
def reach(
    base, vocab, heat, highest, one, two, three,
    SCAN: tl.constexpr, MASS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of the logits >= each of three ascending ones: how many, and (MASS) the sum of their weights."""
    counts = tl.zeros((SCAN,), tl.int32)  # ten bits each: a lane sees fewer than 1,024 logits
    first = tl.zeros((SCAN,), tl.float32)
    second = tl.zeros((SCAN,), tl.float32)
    third = tl.zeros((SCAN,), tl.float32)
    for start in range(0, vocab, SCAN):
        value = read(base, start, vocab, SCAN)
        counts += (value >= one).to(tl.int32) + ((value >= two).to(tl.int32) << 10)
        counts += (value >= three).to(tl.int32) << 20
        if MASS:
            weight = weight_of(value, heat, highest, EXACT)
            first += tl.where(value >= one, weight, 0.0)
            second += tl.where(value >= two, weight, 0.0)
            third += tl.where(value >= three, weight, 0.0)
    return (
        tl.sum(counts & 1023, 0), tl.sum((counts >> 10) & 1023, 0), tl.sum(counts >> 20, 0),
        tl.sum(first.to(tl.float64), 0), tl.sum(second.to(tl.float64), 0),
        tl.sum(third.to(tl.float64), 0),
    )  # fmt: skip


@triton.jit
def ends(base, vocab, low, high, SCAN: tl.constexpr):
    """The smallest logit >= low and the largest <= high."""
    least = tl.full((SCAN,), float("inf"), tl.float32)
    most = tl.full((SCAN,), float("-inf"), tl.float32)
    for start in range(0, vocab, SCAN):
        value = read(base, start, vocab, SCAN)
        inside = start + tl.arange(0, SCAN) < vocab
        least = tl.minimum(least, tl.where(inside & (value >= low), value, float("inf")))
        most = tl.maximum(most, tl.where(inside & (value <= high), value, float("-inf")))
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def search(
    base, vocab, heat, highest, low, high, at_low, wanted, target,
    SCAN: tl.constexpr, MASS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(key, how many reach it): the largest key in [low, high) reached by logits of the mass
    `target`, or (not MASS) by `wanted` logits; or a smaller one that the same logits reach.

    Quarters the range; every eighth time it shrinks to what is in it, which ends it where logits
    are few values many times over, as those of bfloat16 are."""
    at_high = wanted * 0
    step = wanted * 0
    going = high - low > 1
    if not MASS:
        going = going & (at_low != wanted)
    while going:
        step += 1
        half = low + (high - low) // 2
        early = low + (high - low) // 4
        late = tl.minimum(half + (high - half) // 2, high - 1)
        n1, n2, n3, m1, m2, m3 = reach(
            base, vocab, heat, highest, value_of(early), value_of(half), value_of(late),
            SCAN, MASS, EXACT,
        )  # fmt: skip
        if MASS:
            in1 = m1 >= target
            in2 = m2 >= target
            in3 = m3 >= target
        else:
            in1 = n1 >= wanted
            in2 = n2 >= wanted
            in3 = n3 >= wanted
        high = tl.where(in1, tl.where(in2, tl.where(in3, high, late), half), early)
        at_high = tl.where(in1, tl.where(in2, tl.where(in3, at_high, n3), n2), n1)
        at_low = tl.where(in3, n3, tl.where(in2, n2, tl.where(in1, n1, at_low)))
        low = tl.where(in3, late, tl.where(in2, half, tl.where(in1, early, low)))
        if (step % 8 == 0) & (high - low > 1):
            least, most = ends(base, vocab, value_of(low), value_of(high - 1), SCAN)
            low = key_of(least)
            high = key_of(most) + 1
        going = high - low > 1
        if MASS:
            going = going & (at_low - at_high > 1)
        else:
            going = going & (at_low != wanted)
    return low, at_low


@triton.jit
def search_floor(
    logits, temperature, top_k, top_p, min_p, floors, vocab,
    SCAN: tl.constexpr, FILTERS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Per row, the smallest logit / temperature that passes every filter.

    Searches among logits as they are, whose order tempering keeps; weights are of tempered ones."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    heat = tl.load(temperature + row)
    least = tl.load(min_p + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if (least > 0.0) | FILTERS:
        bottom, top = ends(base, vocab, float("-inf"), float("inf"), SCAN)
        highest = tl.div_rn(top, heat)
        if least > 0.0:
            floor = highest + (tl.log(least) if EXACT else libdevice.log(least))
        if FILTERS:
            wanted = tl.minimum(tl.load(top_k + row), vocab).to(tl.int32)
            share = tl.load(top_p + row)
            end = key_of(top) + 1
            low, reached = search(
                base, vocab, heat, highest, key_of(bottom), end, wanted * 0 + vocab, wanted,
                0.0, SCAN, False, EXACT,
            )  # fmt: skip
            if share < 1.0:
                # What the top_k hold, of those that tie with the last one no more than fit.
                tied = reached != wanted
                bound = value_of(low + tied.to(tl.int64))
                above, _, _, mass, _, _ = reach(
                    base, vocab, heat, highest, bound, bound, bound, SCAN, True, EXACT
                )
                weight = weight_of(value_of(low), heat, highest, EXACT).to(tl.float64)
                mass += tl.where(tied, (wanted - above) * weight, 0.0)
                target = share.to(tl.float64) * mass
                low, reached = search(
                    base, vocab, heat, highest, low, end, reached, wanted, target,
                    SCAN, True, EXACT,
                )  # fmt: skip
            last, _ = ends(base, vocab, value_of(low), float("inf"), SCAN)
            floor = tl.maximum(floor, tl.div_rn(last, heat))
    tl.store(floors + row, floor)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    if need["vocab_size"] > 1023 * SCAN:
        found.append(f"a vocabulary of {need['vocab_size']} is more than a lane can count")
    return found


def _slices(rows: int, vocab: int, device: torch.device) -> tuple[int, int]:
    """(slices, tokens of each): about four programs a multiprocessor, whole SLICEs."""
    programs = max(1, 4 * probe(str(device)).multiprocessors // max(rows, 1))
    width = max(SLICE, triton.cdiv(triton.cdiv(vocab, programs), SLICE) * SLICE)
    return triton.cdiv(vocab, width), width


@greedy.backend("triton", reasons=reasons, rank=10)
def run_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    fine = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return tokens, fine
    slices, width = _slices(rows, vocab, device)
    best = torch.empty(rows, slices, dtype=torch.float32, device=device)
    numbers = torch.empty(2, rows, slices, dtype=torch.int32, device=device)
    score[(rows, slices)](
        logits, logits, logits, tokens, tokens, best, numbers[0], numbers[1], vocab, width, slices,
        SLICE=SLICE, DRAW=False, FLOORS=False, EXACT=False, num_warps=8,
    )  # fmt: skip
    pick[(rows,)](
        best, numbers[0], numbers[1], tokens, fine, vocab, slices,
        SLICES=triton.next_power_of_2(slices), DRAW=False, num_warps=1,
    )  # fmt: skip
    return tokens, fine


@draw.backend("triton", reasons=reasons, rank=10)
def run_draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
) -> Tensor:
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    exact = interprets(probe(str(device)))
    floors = torch.empty(rows, dtype=torch.float32, device=device)
    block = min(SCAN, max(128, triton.next_power_of_2(vocab)))
    search_floor[(rows,)](
        logits, temperature, top_k, top_p, min_p, floors, vocab,
        SCAN=block, FILTERS=width > 0, EXACT=exact, num_warps=max(4, block // 128),
    )  # fmt: skip
    slices, each = _slices(rows, vocab, device)
    best = torch.empty(rows, slices, dtype=torch.float32, device=device)
    places = torch.empty(rows, slices, dtype=torch.int32, device=device)
    score[(rows, slices)](
        logits, temperature, floors, seeds, positions, best, places, places, vocab, each, slices,
        SLICE=SLICE, DRAW=True, FLOORS=True, EXACT=exact, num_warps=8,
    )  # fmt: skip
    pick[(rows,)](
        best, places, places, tokens, tokens, vocab, slices,
        SLICES=triton.next_power_of_2(slices), DRAW=True, num_warps=1,
    )  # fmt: skip
    return tokens
