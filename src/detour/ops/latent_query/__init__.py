"""latent_query: a query head's plain part into the latent space, its rope part turned."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from detour.ops.index_key import rotate_first
from detour.ops.op import Need, op


def _inputs(device: torch.device) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    source = torch.Generator().manual_seed(57)
    sizes = ((torch.float32, 4, 24, 32, 16), (torch.bfloat16, 8, 192, 512, 64))
    for dtype, heads, plain, rank, rope in sizes:
        for tokens, interleaved in ((1, True), (19, False)):
            q = torch.randn(tokens, heads, plain + rope, generator=source)
            # A part of each head of a wider matrix, as kv_b_proj holds it.
            keys = torch.randn(heads, plain + 8, rank, generator=source) * rank**-0.5
            angles = 6.28 * torch.rand(tokens, rope // 2, generator=source)
            need = {"dtype": dtype, "heads": heads, "plain": plain, "rank": rank, "rope": rope}
            turns = (angles.cos().to(device), angles.sin().to(device))
            yield (
                need,
                (q.to(device, dtype), keys.to(device, dtype)[:, :plain], *turns, interleaved),
            )


@op(__name__, inputs=_inputs, tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2})
def latent_query(q: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """q[t, h, :plain] @ keys[h] | rope(q[t, h, plain:]) -> [T, heads, rank + rope], contiguous.

    q         [T, heads, plain + rope] floating, contiguous
    keys      [heads, plain, rank] of its dtype, heads may be strided: what makes keys of latents
    cos, sin  [T, rope / 2] float32; pairs (2i, 2i + 1) if interleaved, else (i, i + rope / 2)

    With it queries meet latents as they are cached, so keys are never made ("absorbed",
    DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A need is {"dtype", "heads", "plain", "rank",
    "rope"}.
    """
    plain, rank = keys.shape[1:]
    out = torch.empty(*q.shape[:2], rank + q.shape[2] - plain, dtype=q.dtype, device=q.device)
    torch.bmm(q[..., :plain].transpose(0, 1), keys, out=out[..., :rank].transpose(0, 1))
    turned = q[..., plain:].float().contiguous()
    if interleaved:  # few launches: on a GPU nothing else computes this
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))
        out[..., rank:] = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
    else:
        out[..., rank:] = rotate_first(turned, cos, sin, interleaved)
    return out
