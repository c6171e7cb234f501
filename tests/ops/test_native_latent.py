"""Latent attention in C++: the same bits dense or sparse, alone or in a batch, in chunks, on any pages."""

import pytest
import torch
from test_ops import copied

from detour.ops import native
from detour.ops.attention import make_batch
from detour.ops.device import probe
from detour.ops.index_key import (
    index_key,
    index_query,
    key_inputs,
    quantise_index,
    read_index,
    write_index,
)
from detour.ops.index_scores import index_scores
from detour.ops.kv_layout import index_keys, index_keys_fp8, latent, latent_fp8_packed
from detour.ops.latent_query import latent_query
from detour.ops.latent_value import latent_value
from detour.ops.latent_write import latent_write
from detour.ops.latent_write import make_inputs as latent_inputs
from detour.ops.mla import LatentShape, dense_mla, pack_latent, sparse_mla, unpack_latent

if why := native.reasons(probe("cpu")):
    pytest.skip("; ".join(why), allow_module_level=True)

CPU = torch.device("cpu")
RANK, ROPE, HEADS, LENGTH = 32, 16, 5, 101
LAYOUTS = (
    latent(torch.float32, RANK, ROPE),
    latent(torch.bfloat16, RANK, ROPE),
    latent_fp8_packed(RANK, ROPE),
)


def source(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shape_of(layout) -> LatentShape:
    return LatentShape(HEADS, RANK, ROPE, 0.2, layout)


def placed(rows: torch.Tensor, row: int, batch) -> torch.Tensor:
    """A cache [pages, page_size, width] in which one row of the batch holds `rows`, NaN elsewhere."""
    pages, size = int(batch.page_table.max()) + 1, batch.page_size
    fill = 127 if rows.dtype == torch.uint8 else torch.nan
    cache = torch.full((pages * size, rows.shape[1]), fill, dtype=rows.dtype)
    place = torch.arange(int(batch.lengths[row]))
    slots = batch.page_table[row].long()[place // size] * size + place % size
    cache[slots] = rows[: len(place)]
    return cache.view(pages, size, -1)


def dense(layout, q, rows, pieces, page_size: int, others: int) -> torch.Tensor:
    """The last tokens of a sequence in pieces, each beside `others` sequences."""
    backend, shape, out = dense_mla.discover()["native"], shape_of(layout), []
    start = LENGTH - len(q)
    for piece in pieces:
        batch = make_batch([(9 * n, 1) for n in range(others)] + [(start, piece)], page_size, CPU,
                           source(page_size))  # fmt: skip
        first = start - (LENGTH - len(q))
        beside = torch.randn(others, *q.shape[1:], generator=source(3)).to(q.dtype)
        both = torch.cat([beside, q[first : first + piece]])
        cache = placed(rows, others, batch)
        out.append(backend.run(backend.plan(batch, shape), both, cache)[others:])
        start += piece
    return torch.cat(out)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.name}-{one.dtype}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_depend_on_what_is_beside_it(layout, dtype):
    rows = torch.randn(LENGTH, RANK + ROPE, generator=source())
    rows = pack_latent(rows, RANK) if layout.dtype == torch.uint8 else rows.to(layout.dtype)
    q = torch.randn(70, HEADS, RANK + ROPE, generator=source(2)).to(dtype)
    whole = dense(layout, q, rows, [70], 16, 0)
    for pieces, page_size, others in (([70], 1, 3), ([1] * 70, 16, 0), ([33, 1, 36], 64, 40)):
        assert torch.equal(dense(layout, q, rows, pieces, page_size, others), whole)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.name}-{one.dtype}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_selected_is_dense_to_the_last_bit(layout, dtype):
    rows = torch.randn(LENGTH, RANK + ROPE, generator=source())
    rows = pack_latent(rows, RANK) if layout.dtype == torch.uint8 else rows.to(layout.dtype)
    q = torch.randn(70, HEADS, RANK + ROPE, generator=source(2)).to(dtype)
    slots = torch.full((70, 128), -1, dtype=torch.int32)
    for token in range(70):
        slots[token, : LENGTH - 69 + token] = torch.arange(LENGTH - 69 + token)
    counts = (slots >= 0).sum(1).int()
    cache = rows.view(LENGTH, 1, -1)
    for some in (slice(None), slice(0, 1), slice(60, 70)):
        arguments = (q[some], cache, slots[some], counts[some], shape_of(layout))
        got = sparse_mla.discover()["native"].run(*arguments)
        assert torch.equal(got, dense(layout, q, rows, [70], 16, 0)[some])


def test_a_token_that_selects_nothing_gets_nothing():
    q = torch.randn(2, HEADS, RANK + ROPE, generator=source())
    cache = torch.full((4, 1, RANK + ROPE), torch.nan)
    slots, counts = torch.full((2, 8), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    out = sparse_mla.discover()["native"].run(q, cache, slots, counts, shape_of(LAYOUTS[0]))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_do_not_depend_on_the_tokens_beside(dtype):
    expand = torch.randn(HEADS, 24 + 20, RANK, generator=source()).to(dtype)
    q = torch.randn(75, HEADS, 24 + ROPE, generator=source(2)).to(dtype)
    angles = torch.rand(75, ROPE // 2, generator=source(3))
    latents = torch.randn(75, HEADS, RANK, generator=source(4)).to(dtype)
    ask, give = latent_query.discover()["native"].run, latent_value.discover()["native"].run
    queries = ask(q, expand[:, :24], angles.cos(), angles.sin(), True)
    values = give(latents, expand[:, 24:])
    for first, last in ((0, 1), (3, 10), (31, 75), (74, 75)):
        some = slice(first, last)
        turns = (angles[some].cos(), angles[some].sin())
        assert torch.equal(ask(q[some], expand[:, :24], *turns, True), queries[some])
        assert torch.equal(give(latents[some].contiguous(), expand[:, 24:]), values[some])


@pytest.mark.parametrize("packed", [False, True])
def test_scores_do_not_depend_on_what_is_beside_them(packed):
    width, heads = 32, 16
    layout = index_keys_fp8(width) if packed else index_keys(torch.float32, width)
    keys = torch.randn(LENGTH, width, generator=source())
    q = torch.randn(70, heads, width, generator=source(2))
    weight = torch.randn(70, heads, generator=source(3))
    asked = quantise_index(q)[0] if packed else q
    backend = index_scores.discover()["native"]

    def scores(pieces: list[int], page_size: int, others: int) -> torch.Tensor:
        out, start = [], LENGTH - 70
        for piece in pieces:
            rows = [(9 * n, 1) for n in range(others)] + [(start, piece)]
            batch = make_batch(rows, page_size, CPU, source(page_size))
            pages = int(batch.page_table.max()) + 1
            cache = torch.zeros(pages, page_size, layout.width, dtype=layout.dtype)
            place = torch.arange(start + piece)
            table = batch.page_table[others].long()
            slots = table[place // page_size] * page_size + place % page_size
            if packed:
                write_index(cache, slots, *quantise_index(keys[: len(place)]))
            else:
                cache.view(-1, width)[slots] = keys[: len(place)]
            some = slice(start - (LENGTH - 70), start - (LENGTH - 70) + piece)
            beside = [torch.zeros(others, *one.shape[1:]).to(one.dtype) for one in (asked, weight)]
            both = [
                torch.cat([one.view(torch.uint8), two.view(torch.uint8)]).view(one.dtype)
                for one, two in zip(beside, (asked[some], weight[some]), strict=True)
            ]
            plan = backend.plan(batch, layout)
            made = backend.run(plan, *both, cache)[others:, :LENGTH]
            seen = torch.arange(made.shape[1]) <= batch.positions[others:, None]
            made = made.masked_fill(~seen, 0)
            out.append(torch.nn.functional.pad(made, (0, LENGTH - made.shape[1])))
            start += piece
        return torch.cat(out)

    whole = scores([70], 16, 0)
    for pieces, page_size, others in (([70], 1, 3), ([1] * 70, 16, 0), ([33, 1, 36], 64, 40)):
        assert torch.equal(scores(pieces, page_size, others), whole)


def test_written_rows_are_those_of_the_references():
    """But for what a last bit rounds the other way: two in a thousand numbers."""
    for op, inputs, cache, read in (
        (latent_write, latent_inputs, 6, unpack_rows),
        (index_key, key_inputs, 7, read_keys),
    ):
        backend = op.discover()["native"]
        for need, arguments in inputs(CPU, packed=True):
            assert not backend.reasons(probe("cpu"), need)
            theirs, ours = copied(arguments), copied(arguments)
            op.reference.run(*theirs)
            backend.run(*ours)
            got, expected = read(ours[cache], arguments[-1]), read(theirs[cache], arguments[-1])
            different = (got - expected).abs() > 1e-6 * expected.abs()
            assert different.float().mean() < 2e-3, need
            assert torch.allclose(got, expected, rtol=0.13, atol=1e-2)


def unpack_rows(cache: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    return unpack_latent(cache, shape)


def read_keys(cache: torch.Tensor, layout) -> torch.Tensor:
    return read_index(cache, torch.arange(cache.shape[0] * cache.shape[1]), layout)


def test_every_number_rounds_to_e4m3_as_torch_rounds_it():
    """Through queries of a width whose first number sets the scale to one."""
    numbers = torch.cat([torch.randn(4000, generator=source()) * 10.0**k for k in range(-4, 3)])
    numbers = torch.cat([numbers.clamp(-448, 448), torch.arange(-448.0, 448.0, 0.0625)])
    rows = numbers[: len(numbers) // 7 * 7].view(-1, 1, 7)
    q = torch.cat([torch.full((len(rows), 1, 1), 448.0), rows], -1).contiguous()
    none = torch.zeros(len(q), 0)
    gate = torch.ones(len(q), 1)
    got, weights = index_query.discover()["native"].run(
        q, gate, none, none, True, index_keys_fp8(8)
    )
    assert torch.equal(got.float(), q.to(torch.float8_e4m3fn).float())
    assert torch.equal(weights, gate * 8**-0.5)
