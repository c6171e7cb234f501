"""The C++ kernels: the same bits alone and in a batch, in chunks and whole, on any page size."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from detour.ops import native
from detour.ops.attention import AttentionShape, attention, make_batch
from detour.ops.device import probe
from detour.ops.gemm import gemm, random_weight
from detour.ops.kv_layout import grouped_query

if why := native.reasons(probe("cpu")):
    pytest.skip("; ".join(why), allow_module_level=True)

NO_BIAS = torch.zeros(0)
PRODUCTS = {torch.float32: "native", torch.bfloat16: "native_bf16"}
both_dtypes = pytest.mark.parametrize("dtype", PRODUCTS)


def products(packing, dtype):
    """The backend of a packing and of x's dtype, or a skip."""
    backend = gemm.discover()[PRODUCTS[dtype]]
    stored = dtype if packing == "dense" else torch.uint8
    need = {"packing": packing, "dtype": dtype, "stored": stored, "rows": 73, "columns": 64}
    if why := backend.reasons(probe("cpu"), need):
        pytest.skip("; ".join(why))
    return backend


def source(seed=1):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("packing", ["dense", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("columns", [64, 320])
@both_dtypes
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype, packing, columns):
    backend = products(packing, dtype)
    weight = backend.plan(random_weight(packing, 73, columns, source()))
    x = torch.randn(200, columns, generator=source(2)).to(dtype)
    whole = backend.run(weight, x, NO_BIAS)
    for rows in (*range(1, 20), 33, 97):
        for first in (0, 5):
            part = backend.run(weight, x[first : first + rows], NO_BIAS)
            assert torch.equal(part, whole[first : first + rows])


def attend(q, keys, values, start, pieces, page_size, others=0):
    """Attention of tokens [start, ...) of a sequence cut into pieces, beside `others` sequences."""
    backend, length = attention.discover()["native"], len(keys)
    shape = AttentionShape(6, 2, 64, 0.125, grouped_query(keys.dtype, 2, 64))
    out, first = [], start
    for piece in pieces:
        rows = [(7 * n, 1) for n in range(others)] + [(first, piece)]
        batch = make_batch(rows, page_size, torch.device("cpu"), source(page_size))
        cache = torch.full((2, int(batch.page_table.max()) + 1, page_size, 2, 64), 0.5)
        places = np.arange(-(-(first + piece) // page_size) * page_size)
        table = batch.page_table[-1].numpy()
        slots = torch.from_numpy(table[places // page_size] * page_size + places % page_size).long()
        flat = cache.view(2, -1, 2, 64)
        flat[:, slots] = torch.nan  # past the end of the sequence
        slots = slots[: first + piece]
        for place, given in enumerate((keys, values)):
            flat[place, slots] = given[: len(slots)].float()
        cache = cache.to(keys.dtype)
        fed = torch.zeros(others + piece, 6, 64, dtype=q.dtype)
        fed[others:] = q[first : first + piece]
        out.append(backend.run(backend.plan(batch, shape), fed, cache[0], cache[1])[others:])
        first += piece
    assert first == length
    return torch.cat(out)


@both_dtypes
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_attention_does_not_depend_on_chunks_pages_or_neighbours(dtype, cached):
    length, start = 150, 20
    q = torch.randn(length, 6, 64, generator=source(3)).to(dtype)
    keys = torch.randn(length, 2, 64, generator=source(4)).to(cached)
    values = torch.randn(length, 2, 64, generator=source(5)).to(cached)
    whole = attend(q, keys, values, start, [length - start], 16)
    assert torch.isfinite(whole).all()
    for pieces, page_size, others in (
        ([1] * 130, 16, 3),
        ([16] * 8 + [2], 1, 0),
        ([100, 1, 29], 64, 40),
        ([130], 48, 2),
    ):
        assert torch.equal(attend(q, keys, values, start, pieces, page_size, others), whole)


@both_dtypes
def test_long_scores_do_not_overflow_the_softmax(dtype):
    q = torch.full((1, 6, 64), 10.0, dtype=dtype)
    keys = torch.cat([torch.full((1, 2, 64), scale, dtype=dtype) for scale in (-9.0, 0.0, 9.0)])
    values = torch.arange(3.0)[:, None, None].expand(3, 2, 64).to(dtype).contiguous()
    out = attend(q.expand(3, 6, 64), keys, values, 2, [1], 1)
    assert torch.equal(out, torch.full((1, 6, 64), 2.0, dtype=dtype))


def test_reasons_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: "")
    assert native.reasons(probe("cpu")) == ["no C++ compiler (c++, g++ or clang++) was found"]


@pytest.fixture
def threads():
    before = native.threads()
    yield native.set_threads
    native.set_threads(before)


def test_threads_and_callers_do_not_change_a_bit(threads):
    """Also with more threads than cores, and two callers at once: one of them then works alone."""
    backend = gemm.discover()["native"]
    weight = backend.plan(random_weight("Q4_1", 1600, 320, source()))
    inputs = [torch.randn(rows, 320, generator=source(rows)) for rows in (1, 2, 7, 40, 100)]
    threads(1)
    expected = [backend.run(weight, x, NO_BIAS) for x in inputs]

    def all_of_them(count):
        threads(count)
        for _ in range(20):
            for x, known in zip(inputs, expected, strict=True):
                assert torch.equal(backend.run(weight, x, NO_BIAS), known)

    all_of_them(2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(all_of_them, (2, 3, 5)))
