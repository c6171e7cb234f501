"""No flag changes the answer: prefix cache, chunks, batches and pages, on a tiny GLM-5.

Tokens are compared within what KV is cached in; the first of each column is computed alone, whole
and without a prefix cache. Lengths stand around index_topk, pages and chunks.
"""

import itertools
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tiny_glm import MODELS, TOP_K, write_tiny_glm

from detour.llm import LLM
from detour.ops import native
from detour.ops.device import probe
from detour.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
WHOLE = -1


class Flags(NamedTuple):
    """What an operator may set without changing an answer."""

    radix: bool
    chunk: int
    batch: int
    page_size: int


PLAIN = Flags(radix=False, chunk=WHOLE, batch=1, page_size=16)
FEW = (
    Flags(radix=True, chunk=16, batch=16, page_size=16),
    Flags(radix=True, chunk=64, batch=4, page_size=1),
    Flags(radix=False, chunk=16, batch=16, page_size=64),
)
ALL = tuple(
    Flags(*values)
    for values in itertools.product((True, False), (16, 64, WHOLE), (1, 16), (1, 16, 64))
)
COLUMNS = ("float32", "bfloat16", "fp8_e4m3")


def tokens(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(8, 300) for _ in range(length)]


def around(*lengths: int) -> list[int]:
    return [length + more for length in lengths for more in (-1, 0, 1)]


PROMPTS = {
    "no shared prefix": [tokens(n, n) for n in around(TOP_K, 64)] + [tokens(7, 150)],
    "shared": [tokens(1, 64) + tokens(n, n) for n in (1, 15, 16, 17, 40)],
    "mixed": [tokens(2, 48) + tokens(n, n) for n in (3, 33)] + [tokens(90, 90), tokens(1, 64)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a tiny model once."""

    @cache
    def written(name: str) -> Path:
        return write_tiny_glm(tmp_path_factory.mktemp(name), name)

    return written


@pytest.fixture(scope="module")
def plain(folder):
    """The answers of a column, each prompt alone."""

    @cache
    def answers(name: str, kv: str) -> dict[str, list[list[int]]]:
        with open_with(folder(name), kv, PLAIN) as llm:
            return {kind: said(llm, prompts) for kind, prompts in PROMPTS.items()}

    return answers


def open_with(folder: Path, kv: str, flags: Flags, **more) -> LLM:
    options = {"dtype": "float32", "threads": 1, "context_length": 256, "max_total_tokens": 4096}
    return LLM(
        str(folder),
        kv_cache_dtype=kv,
        disable_radix_cache=not flags.radix,
        chunked_prefill_size=flags.chunk,
        max_running_requests=flags.batch,
        page_size=flags.page_size,
        **{**options, **more},
    )


def said(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def check(
    folder: Path, kv: str, flags: Flags, expected: dict[str, list[list[int]]], **more
) -> None:
    """Every kind of prompt twice: the second time all of it may be cached."""
    with open_with(folder, kv, flags, **more) as llm:
        for kind, prompts in PROMPTS.items():
            for turn in ("first", "again"):
                outputs = llm.generate(prompts, GREEDY)
                assert [one.token_ids for one in outputs] == expected[kind], (kind, turn)
            cached = [one.cached_tokens for one in outputs]
            assert any(cached) == flags.radix, (kind, cached)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", COLUMNS)
@pytest.mark.parametrize("flags", ALL, ids=str)
def test_no_flags_change_the_answer(folder, plain, flags, kv):
    check(folder("glm52"), kv, flags, plain("glm52", kv))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", COLUMNS)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"glm52"}))
@pytest.mark.parametrize("flags", FEW, ids=str)
def test_flags_do_not_change_the_answer_of_any_model(folder, plain, name, flags, kv):
    check(folder(name), kv, flags, plain(name, kv))


@pytest.mark.slow
@pytest.mark.parametrize("kv", COLUMNS)
@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
def test_no_backend_changes_the_answer(folder, plain, backend, kv):
    """Backends add in different orders. Where a last bit decides how a cached number is rounded,
    random weights make another answer of it now and then; in float32 there is nothing to round."""
    expected = [one for answers in plain("glm52", kv).values() for one in answers]
    with open_with(folder("glm52"), kv, FEW[0], attention_backend=backend) as llm:
        got = [one for prompts in PROMPTS.values() for one in said(llm, prompts)]
    same = sum(one == other for one, other in zip(got, expected, strict=True))
    exact = kv == "float32" or backend == "native"
    assert same >= len(expected) - (0 if exact else 2), (same, len(expected))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", MODELS)
def test_flags_do_not_change_the_answer_in_bfloat16(folder, name, kv):
    """Where a last bit would show: every kernel gives a token the same bits in any batch."""
    if native.dtype_reasons(probe("cpu"), torch.bfloat16):
        pytest.skip("references round by what is computed together")
    with open_with(folder(name), kv, PLAIN, dtype="bfloat16") as llm:
        expected = {kind: said(llm, prompts) for kind, prompts in PROMPTS.items()}
    for flags in FEW:
        check(folder(name), kv, flags, expected, dtype="bfloat16")


@pytest.mark.parametrize(
    "chunk",
    [16, pytest.param(24, marks=pytest.mark.slow), pytest.param(-1, marks=pytest.mark.slow)],
)
def test_seed_bug_fp8_prefix_present_and_absent_in_one_batch(folder, chunk):
    """Where others crashed or answered wrongly: an e4m3 cache and a prefix that is there, or not.

    A long prompt's second and later chunks, rows that found their prefix cached, rows that did
    not, and decodes share steps; contexts cross index_topk, page and chunk boundaries.
    """
    first = tokens(3, 96)
    lengths = [7, *around(16, 64), 33]
    prompts = [first[:length] + tokens(length, 5) for length in lengths]
    prompts += [tokens(500 + length, length) for length in around(TOP_K, 32)]
    with open_with(folder("glm52"), "fp8_e4m3", PLAIN) as llm:
        expected = said(llm, prompts)
    with open_with(folder("glm52"), "fp8_e4m3", Flags(True, chunk, 8, 16)) as llm:
        llm.generate([first], GREEDY)
        outputs = llm.generate(prompts, GREEDY)
    assert [one.token_ids for one in outputs] == expected
    hit = [one.cached_tokens for one in outputs]
    assert hit[lengths.index(64)] == 64 and hit[lengths.index(33)] == 32 and hit[-1] == 0


def test_what_is_cached_in_fewer_bits_costs_fewer_bytes(folder):
    """Latents of 32 + 16 numbers in four layers, index keys of 32 in the three that select."""
    expected = {
        "float32": 4 * 48 * 4 + 3 * 32 * 4,
        "bfloat16": 4 * 48 * 2 + 3 * 36,
        "fp8_e4m3": 4 * (32 + 4 + 2 * 16) + 3 * 36,
    }
    for kv, size in expected.items():
        with open_with(folder("glm52"), kv, PLAIN) as llm:
            assert llm._executor.geometry.kv_bytes_per_token == size, kv
