"""latent_value: what attention gives in the latent space, to each head's values."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.op import Need, op


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(59)
    for dtype, heads, width, rank in ((torch.float32, 4, 20, 32), (torch.bfloat16, 8, 256, 512)):
        for tokens in (1, 35):
            latents = torch.randn(tokens, heads, rank, generator=source)
            # A part of each head of a wider matrix, as kv_b_proj holds it.
            values = torch.randn(heads, 8 + width, rank, generator=source) * rank**-0.5
            need = {"dtype": dtype, "heads": heads, "width": width, "rank": rank}
            yield need, (latents.to(device, dtype), values.to(device, dtype)[:, 8:])


@op(__name__, inputs=_inputs, tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2})
def latent_value(latents: Tensor, values: Tensor) -> Tensor:
    """latents[t, h] @ values[h].T -> [T, heads * width], contiguous.

    latents  [T, heads, rank] floating, contiguous
    values   [heads, width, rank] of its dtype, heads may be strided: what makes values of latents

    The counterpart of latent_query. A need is {"dtype", "heads", "width", "rank"}.
    """
    shape = (len(latents), *values.shape[:2])
    out = torch.empty(shape, dtype=latents.dtype, device=latents.device)
    torch.bmm(latents.transpose(0, 1), values.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
