"""What bench/kernels.py times of choosing: positions by their scores, tokens by their logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from kernel_case import GPU, Calls, Case, backend, sets

from detour.ops.index_topk import index_topk
from detour.ops.index_topk import make_inputs as topk_inputs
from detour.ops.index_topk import triton as topk_triton
from detour.ops.sampling import draw, greedy

VOCAB = 128_256


def topk_cases(variants: bool) -> Iterator[Case]:
    shapes = [(64, 8192), (64, 32768), (64, 65536), (1, 32768), (8, 131_072), (512, 16384)]
    for tokens, length in shapes:
        size = tokens * (length + 2048) * 4
        tried: dict[str, Callable[..., Any]] = {
            "triton": backend(index_topk), "torch.topk": torch_topk,
        }  # fmt: skip
        if variants:
            tried |= topk_variants(length)
        for name, run in tried.items():

            def make(tokens=tokens, length=length, run=run) -> Calls:  # type: ignore[no-untyped-def]
                inputs = [
                    topk_inputs([length] * tokens, length, 2048, 64, GPU, seed)
                    for seed in range(min(8, sets(4 * tokens * length)))
                ]
                return [lambda a=a: run(*a) for a in inputs]

            yield Case("index_topk", name, f"T={tokens} x {length}", size, 0, make)


def topk_variants(length: int) -> dict[str, Callable[..., Any]]:
    chosen = topk_triton.choose_cut(length)
    tried = [replace(chosen, chunk=chunk) for chunk in (2048, 4096, 8192) if chunk != chosen.chunk]
    tried += [replace(chosen, warp=512)]
    if length > 8192:
        tried += [replace(chosen, segment=32768), replace(chosen, segment=8192, warp=512)]
    return {
        f"{cut.segment}/{cut.chunk}/{cut.warp}": lambda *a, cut=cut: topk_triton.launch(cut, *a)
        for cut in tried
    }


def torch_topk(scores, lengths, rows, table, page_size, top_k):  # type: ignore[no-untyped-def]
    return scores.topk(top_k, sorted=False)


def sampling_cases(variants: bool) -> Iterator[Case]:
    """Logits as a bfloat16 head gives them, of about the spread of a language model's."""
    kinds = {"plain": (0, 1.0), "top-p 0.95": (VOCAB, 0.95), "top-k 50": (50, 1.0)}
    for rows in (1, 64, 256):
        size = 4 * rows * VOCAB
        for name in ("triton", "reference"):

            def choose(rows=rows, name=name, size=size) -> Calls:  # type: ignore[no-untyped-def]
                run = backend(greedy, name)
                return [lambda x=x: run(x) for x in logits(rows, size)]

            yield Case("greedy", name, f"{rows} x {VOCAB}", size, 0, choose)
            for kind, (width, share) in kinds.items():

                def make(rows=rows, name=name, width=width, share=share, size=size) -> Calls:  # type: ignore[no-untyped-def]
                    run = backend(draw, name)
                    ones = torch.ones(rows, device=GPU)
                    top_k = torch.full((rows,), width or VOCAB, device=GPU)
                    seeds = torch.arange(rows, device=GPU)
                    arguments = (ones, top_k, share * ones, 0 * ones, seeds, seeds + 7, width)
                    return [lambda x=x: run(x, *arguments) for x in logits(rows, size)]

                yield Case("draw", name, f"{rows} x {VOCAB} {kind}", size, 0, make)


def logits(rows: int, size: float) -> list[torch.Tensor]:
    many = min(4, sets(size))
    spread = 3 * torch.randn(many, rows, VOCAB, device=GPU)
    return list(spread.bfloat16().float())
