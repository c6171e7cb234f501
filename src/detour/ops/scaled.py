"""Weights of small floats with scales: NVFP4 and FP8, expanded in torch.

Shared by the ops that compute on such weights; knows no files.
"""

from functools import cache

import torch
from torch import Tensor

NVFP4_BLOCK = 16  # columns that share one e4m3 scale
FP8_BLOCK = 128  # columns that share one float32 scale, where not all do
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """float32 weights [..., N, K] = e2m1 * (block scale * global scale), as ModelOpt expands them.

    packed [..., N, K / 2] uint8, low nibble = even k, bit 3 of a nibble = sign; scale
    [..., N, K / 16] e4m3; global_scale float32, broadcasts against [..., N, K / 16].
    """
    values = (
        _pairs(packed.device)
        .index_select(0, packed.flatten().int())
        .view(*scale.shape, NVFP4_BLOCK)
    )
    return values.mul_((scale.float() * global_scale)[..., None]).flatten(-2)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2]: what the low and the high half of a byte mean. Copied to a device once."""
    with torch.inference_mode(False):  # whoever asks, others read it too
        signed = torch.tensor([*E2M1, *(-value for value in E2M1)])
        return torch.stack((signed.repeat(16), signed.repeat_interleave(16)), dim=1).to(device)


def unpack_fp8(values: Tensor, scales: Tensor, of_row: Tensor) -> Tensor:
    """float32 weights [N, K] = e4m3 * scale.

    values [N, K] e4m3; scales [S, 1], or [S, K / 128] (rounded up): one for each 128 columns;
    of_row [N] int32: which row of `scales` each row has.
    """
    rows, columns = values.shape
    wide = values.float()
    scales = scales.index_select(0, of_row)
    if scales.shape[1] == 1:
        return wide.mul_(scales)
    if columns % FP8_BLOCK == 0:
        wide.view(rows, -1, FP8_BLOCK).mul_(scales[:, :, None])
        return wide
    return wide.mul_(scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns])


def random_fp8(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Random e4m3 numbers of at most 1.875, on the source's device; needs a byte each."""
    draws = {"generator": source, "device": source.device, "dtype": torch.uint8}
    return torch.randint(0, 256, shape, **draws).bitwise_and_(0xBF).view(torch.float8_e4m3fn)
