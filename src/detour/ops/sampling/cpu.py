"""draw on a CPU: order a few hundred of the largest logits instead of the whole vocabulary.

Where those settle the filters the answer is exact; the few rows where they do not (a flat
distribution with a top_p near 1) take the reference.
"""

import torch
from torch import Tensor

from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.sampling import draw, floors
from detour.ops.sampling.noise import gumbel

_CANDIDATES = 256


def _reasons(device: Device, need: Need) -> list[str]:
    return ["it reads the device's answer on the host"] if device.is_cuda else []


@draw.backend("candidates", reasons=_reasons, rank=1)
def draw_among_candidates(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
) -> Tensor:
    vocab = logits.shape[1]
    if width == 0 or vocab <= 4 * _CANDIDATES:
        return draw.reference.run(logits, temperature, top_k, top_p, min_p, seeds, positions, width)
    scaled = logits / temperature[:, None]
    values, ids = scaled.topk(_CANDIDATES)
    floor = floors(scaled, top_k, top_p, min_p, values)
    scores = values + gumbel(seeds, positions, ids.int())
    scores.masked_fill_(values < floor, -torch.inf)
    best = scores == scores.amax(dim=1, keepdim=True)
    tokens = ids.masked_fill(~best, vocab).amin(dim=1).clamp_(max=vocab - 1)
    # Settled: the last candidate is filtered out, so all that are kept, ties included, were seen.
    settled = (values[:, -1] < floor[:, 0]) & ((top_k <= _CANDIDATES) | (top_k == vocab))
    rest = (~settled).nonzero()[:, 0]
    if len(rest):
        arguments = (logits, temperature, top_k, top_p, min_p, seeds, positions)
        tokens[rest] = draw.reference.run(*(tensor[rest] for tensor in arguments), vocab)
    return tokens
