"""greedy: the likeliest token of each row. draw: one drawn from filtered, tempered logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op
from detour.ops.sampling.noise import gumbel


def _rows(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(6)
    for rows, vocab in ((1, 50), (3, 33), (33, 4096)):
        logits = torch.randn(rows, vocab, generator=source)
        logits[0, [vocab // 3, vocab - 1]] = 9.0
        logits[rows - 1, rows % vocab] = torch.inf
        yield {"dtype": torch.float32, "vocab_size": vocab}, (logits.to(device),)


@op(__name__, inputs=_rows, tolerance={torch.float32: 0.0})
def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(first index of the largest, int64 [R]; whether all are finite, bool [R]) of logits [R, V].

    logits  float32, contiguous. Where they are not all finite the index is in range, no more.
    """
    # An infinity or NaN anywhere survives the sum; finite logits are far from overflowing it.
    return logits.argmax(dim=1), logits.sum(dim=1).isfinite()


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(7)
    shapes = [(1, 50, 0), (5, 1000, 0), (9, 3001, 40), (6, 777, 777), (33, 4096, 100)]
    shapes += [(7, 1500, 1500), (5, 900, 30)]
    if device.type == "cuda":
        shapes += [(6, 128_256, 128_256), (40, 151_552, 50), (5, 128_256, 0), (3, 154_880, 154_880)]
    for number, (rows, vocab, width) in enumerate(shapes):
        logits = torch.randn(rows, vocab, generator=source) * 4
        if number >= 5:  # ties, as of bfloat16 products, and tokens that must never come
            logits = logits.bfloat16().float()
            logits[1::2, ::3] = -torch.inf
        some = torch.rand(rows, generator=source)
        top_k = torch.full((rows,), vocab)
        top_p = torch.ones(rows)
        if 0 < width < vocab:
            top_k = torch.randint(1, width + 1, (rows,), generator=source)
        if width:
            top_p = 0.3 + 0.7 * torch.rand(rows, generator=source)
        tensors = (logits, 0.2 + some, top_k, top_p, torch.where(some > 0.5, 0.05, 0.0))
        seeds = torch.randint(0, 2**62, (rows,), generator=source)
        positions = torch.randint(0, 2**20, (rows,), generator=source)
        moved = tuple(tensor.to(device) for tensor in (*tensors, seeds, positions))
        yield {"dtype": torch.float32, "vocab_size": vocab}, (*moved, width)


def floors(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, values: Tensor) -> Tensor:
    """Per row, the smallest tempered logit that passes every filter: [R, 1].

    scaled [R, V]; `values` [R, W]: each row's W largest, descending, W >= every top_k below V, and
    W = V where a row has a top_p without a top_k (a caller with fewer checks that the floor lies
    above the last of them). Sums run in float64 from the largest down, so the answer depends
    neither on W nor on other rows.
    """
    highest = values[:, :1]
    every = top_k >= scaled.shape[1]
    weights = (values - highest).double().exp_()
    mass = weights.cumsum(dim=1)
    width = values.shape[1]
    last = (top_k - 1).clamp_(0, width - 1)[:, None]
    total = mass.gather(1, last)
    if width < scaled.shape[1]:
        whole = (scaled - highest).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
        total = torch.where(every[:, None], whole, total)
    before = mass - weights
    columns = torch.arange(width, device=scaled.device)
    kept = (columns < top_k[:, None]) & (
        (before < top_p[:, None].double() * total) | (top_p[:, None] >= 1)
    )
    count = kept.sum(dim=1).clamp_(min=1)  # 0 only where the row holds NaN
    floor = values.gather(1, (count - 1)[:, None])
    return torch.maximum(floor, highest + min_p[:, None].log())


@op(__name__, inputs=_inputs, tolerance={torch.float32: 0.0})
def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
) -> Tensor:
    """One token per row -> int64 [R].

    logits       [R, V] float32, with penalties, biases and masks already applied (-inf = never)
    temperature  [R] float32 > 0
    top_k        [R] int64, 1 .. V (V = all)
    top_p, min_p [R] float32; 1 and 0 switch them off
    seeds        [R] int64; positions [R] int64: where in its sequence the drawn token will stand
    width        known on the host: 0 where no row has top_k < V or top_p < 1; else how many of a
                 row's largest logits must be ordered: the largest top_k, or V where a row has top_p
                 without top_k

    Filters apply in the order temperature, top-k, top-p (on what top-k left, renormalised), min-p
    (relative to the most likely token), as transformers' and vLLM's do. A token that ties with the
    last one kept is kept. Among the kept, the token with the largest logit / temperature + noise is
    drawn, the lowest id where two tie; noise is f(seed, position, token id) (see noise.py), so a
    row's token does not depend on the other rows.
    """
    rows, vocab = logits.shape
    scaled = logits / temperature[:, None]
    if width:
        values = scaled.topk(width).values if width < vocab else scaled.sort(descending=True).values
        floor = floors(scaled, top_k, top_p, min_p, values)
    else:
        floor = scaled.amax(dim=1, keepdim=True) + min_p[:, None].log()
    scaled.masked_fill_(scaled < floor, -torch.inf)
    tokens = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    return scaled.add_(gumbel(seeds, positions, tokens)).argmax(dim=1)
