"""The draw op: filters against plain numpy and transformers, noise against statistics."""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from detour.ops.device import probe
from detour.ops.sampling import draw, floors
from detour.ops.sampling.noise import gumbel, row_keys, token_numbers

CPU = torch.device("cpu")
BACKENDS = sorted(draw.discover())


def run_of(name):
    backend = draw.discover()[name]
    reasons = backend.reasons(probe("cpu"), {"dtype": torch.float32, "vocab_size": 4096})
    if reasons:
        pytest.skip("; ".join(reasons))
    return backend.run


def kept_by(logits, temperature, top_k, top_p, min_p):
    """The filters, one row in plain numpy float64: the set of token ids that may be drawn."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    order = order[before < top_p] if top_p < 1 else order
    floor = scaled.max() + np.log(min_p) if min_p else -np.inf
    return {int(token) for token in order if scaled[token] >= floor}


def tensors(rows, vocab, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k or vocab),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), seed),
        torch.arange(rows),
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_equals_the_reference(name):
    run = run_of(name)
    for _, arguments in draw.inputs(CPU):
        assert torch.equal(run(*arguments), draw.reference.run(*arguments))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_draws_exactly_the_kept_tokens(name, filters):
    """Over many positions, every token the oracle keeps is drawn and no other."""
    vocab = 2000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 3 - 8
    logits[::150] += 12  # a few tokens hold nearly all of the mass
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    kept = kept_by(logits.numpy(), **asked)
    assert len(kept) <= 14
    width = asked["top_k"] or (vocab if asked["top_p"] < 1 else 0)
    rows = 1000
    drawn = run_of(name)(logits.repeat(rows, 1), *tensors(rows, vocab, **asked), width)
    assert set(drawn.tolist()) == kept


def test_a_flat_distribution_keeps_more_than_the_candidates():
    """top_p of an almost flat row needs far more tokens than are ordered first."""
    vocab, rows = 4000, 150
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)) * 0.01
    arguments = tensors(rows, vocab, top_p=0.9)
    expected = draw.reference.run(logits.repeat(rows, 1), *arguments, vocab)
    kept = kept_by(logits.numpy(), 1.0, 0, 0.9, 0.0)
    assert set(expected.tolist()) <= kept
    for name in BACKENDS:
        assert torch.equal(run_of(name)(logits.repeat(rows, 1), *arguments, vocab), expected)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.75, "min_p": 0.02},
    ],
    ids=str,
)
def test_filters_equal_transformers(asked):
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(5)) * 3
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | asked
    theirs = TemperatureLogitsWarper(full["temperature"])(None, logits.clone())
    if full["top_k"]:
        theirs = TopKLogitsWarper(full["top_k"])(None, theirs)
    if full["top_p"] < 1:
        theirs = TopPLogitsWarper(full["top_p"])(None, theirs)
    if full["min_p"]:
        theirs = MinPLogitsWarper(full["min_p"])(None, theirs)
    scaled = logits / full["temperature"]
    temperature, top_k, top_p, min_p, _, _ = tensors(6, 400, **full)
    del temperature
    floor = floors(scaled, top_k, top_p, min_p, scaled.sort(descending=True).values)
    assert torch.equal(scaled >= floor, theirs > -torch.inf)


def chi_square(drawn, probabilities):
    expected = probabilities * len(drawn)
    found = np.bincount(drawn, minlength=len(probabilities))
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(vary):
    """Chi-square with 15 degrees of freedom: 37.7 is passed by chance once in a thousand."""
    vocab, rows = 16, 40_000
    logits = torch.linspace(-1.5, 1.5, vocab)
    steps, fixed = torch.arange(rows), torch.full((rows,), 11)
    seeds, positions = (steps, fixed) if vary == "seed" else (fixed, steps)
    temperature, top_k, top_p, min_p, _, _ = tensors(rows, vocab, temperature=0.8)
    drawn = draw.reference.run(
        logits.repeat(rows, 1), temperature, top_k, top_p, min_p, seeds, positions, 0
    )
    assert chi_square(drawn.numpy(), torch.softmax(logits / 0.8, 0).numpy()) < 37.7


def test_consecutive_positions_and_seeds_are_independent():
    """Pairs of draws at neighbouring positions, and of neighbouring seeds, over 8 x 8 cells."""
    vocab, rows = 8, 40_000
    flat = torch.zeros(rows, vocab)
    rest = tensors(rows, vocab)[:4]
    steps, fixed = torch.arange(rows), torch.full((rows,), 5)
    for seeds, positions in ((fixed, steps), (steps, fixed)):
        drawn = draw.reference.run(flat, *rest, seeds, positions, 0).numpy()
        pairs = drawn[0::2] * vocab + drawn[1::2]
        assert chi_square(pairs, np.full(64, 1 / 64)) < 103.4  # once in a thousand, 63 degrees


def test_noise_is_standard_gumbel():
    noise = gumbel(torch.arange(20), torch.arange(20) * 7, torch.arange(20_000, dtype=torch.int32))
    flat = noise.flatten().double()
    assert abs(float(flat.mean()) - 0.57722) < 0.01
    assert abs(float(flat.var()) - 1.64493) < 0.03
    uniform = torch.exp(-torch.exp(-flat))
    found = torch.histc(uniform, 50, 0, 1).numpy()
    assert float(((found - 8000) ** 2 / 8000).sum()) < 85.4  # once in a thousand, 49 degrees
    assert torch.isfinite(noise).all()


def test_every_bit_of_the_key_changes_half_of_the_bits():
    tokens = torch.arange(500, dtype=torch.int32)
    still = token_numbers(row_keys(torch.tensor([77]), torch.tensor([1000])), tokens)
    for bit in range(0, 62, 3):
        for seed, position in ((77 ^ 1 << bit, 1000), (77, 1000 ^ 1 << (bit % 30))):
            keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
            changed = (token_numbers(keys, tokens) ^ still).numpy().astype(np.uint32)
            share = np.unpackbits(changed.view(np.uint8)).mean() * 32 / 31
            assert 0.48 < share < 0.52


def test_noise_bits_in_plain_python():
    """The recipe written again with unbounded integers: a seed must keep its meaning for ever."""
    m64, m32 = 2**64 - 1, 2**32 - 1

    def split_mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & m64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & m64
        return x ^ (x >> 31)

    def number(seed, position, token):
        golden = 0x9E3779B97F4A7C15
        key = split_mix(split_mix((seed + golden) & m64) + position * golden & m64)
        x = token * 0x9E3779B9 & m32
        x = (x ^ (x >> 16)) * 0x85EBCA6B & m32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & m32
        x = (x ^ (x >> 16)) ^ (key & m32)
        x = (x ^ (x >> 16)) * 0x7FEB352D & m32
        x = x + (key >> 32) & m32
        x = (x ^ (x >> 15)) * 0x846CA68B & m32
        return (x ^ (x >> 16)) & (2**31 - 1)

    seeds, positions, tokens = [0, 9, 2**63 - 1], [0, 4096, 10**6], [0, 1, 1234, 154_879]
    numbers = token_numbers(
        row_keys(torch.tensor(seeds), torch.tensor(positions)),
        torch.tensor(tokens, dtype=torch.int32),
    )
    expected = [[number(s, p, t) for t in tokens] for s, p in zip(seeds, positions, strict=True)]
    assert numbers.tolist() == expected


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_alone_draws_what_it_draws_among_others(name):
    run = run_of(name)
    vocab, rows = 3000, 40
    source = torch.Generator().manual_seed(8)
    logits = torch.randn(rows, vocab, generator=source) * 5
    top_k = torch.randint(1, 50, (rows,), generator=source)
    top_p = 0.5 + 0.5 * torch.rand(rows, generator=source)
    temperature, _, _, min_p, _, positions = tensors(rows, vocab, temperature=1.2, min_p=0.01)
    seeds = torch.randint(0, 2**60, (rows,), generator=source)
    among = run(logits, temperature, top_k, top_p, min_p, seeds, positions, 49)
    whole = run(logits, temperature, top_k, top_p, min_p, seeds, positions, vocab)
    assert torch.equal(among, whole)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = run(
            logits[one],
            temperature[one],
            top_k[one],
            top_p[one],
            min_p[one],
            seeds[one],
            positions[one],
            int(top_k[row]),
        )
        assert int(alone) == int(among[row])


def test_masked_and_nan_rows_do_not_fail():
    logits = torch.zeros(3, 600)
    logits[0, 1:] = -torch.inf
    logits[1] = torch.nan
    arguments = tensors(3, 600, top_p=0.9)
    for name in BACKENDS:
        drawn = run_of(name)(logits, *arguments, 600)
        assert int(drawn[0]) == 0
        assert ((drawn >= 0) & (drawn < 600)).all()
