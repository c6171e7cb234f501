"""Weights of small floats with scales, as checkpoints hold them: packing, unpacking, cutting.

Knows NVFP4 and FP8; knows neither names nor files. weight = values * scales in every kind.

Sources: NVIDIA ModelOpt's and compressed-tensors' exports, the FP8 releases of DeepSeek-V3 and GLM-5.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NVFP4_BLOCK = 16  # columns that share an e4m3 scale
FP8_BLOCK = 128  # rows and columns of a square that shares a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_MIN = 2.0**-9

KINDS = ("NVFP4", "FP8_TENSOR", "FP8_CHANNEL", "FP8_BLOCK")
_COLUMNS = {"NVFP4": NVFP4_BLOCK, "FP8_BLOCK": FP8_BLOCK}


class ScaledTensor(NamedTuple):
    """A matrix [rows, columns] as it lies in a checkpoint.

    kind       NVFP4      values [rows, columns / 2] uint8: two e2m1 a byte, the even column low;
                          scales [rows, columns / 16] e4m3; `of_row` [rows] float32 times both
               FP8_*      values [rows, columns] e4m3; scales [s, t] float32, t = 1 or a column
                          for each 128; `of_row` [rows] int32: which row of `scales` is a row's
               FP8_TENSOR s = t = 1; FP8_CHANNEL s = rows, t = 1; FP8_BLOCK s = rows / 128, up
    """

    kind: str
    shape: tuple[int, int]
    values: Tensor
    scales: Tensor
    of_row: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.scales, self.of_row


def unpack_scaled(packed: ScaledTensor) -> Tensor:
    """[rows, columns] float32. NVFP4 multiplies the two scales first, as ModelOpt does."""
    rows, columns = packed.shape
    if packed.kind == "NVFP4":
        signed = torch.tensor([*E2M1, *(-value for value in E2M1)])
        pairs = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), dim=1)  # by byte
        values = pairs.index_select(0, packed.values.flatten().int())
        values = values.view(rows, columns // NVFP4_BLOCK, NVFP4_BLOCK)
        values *= (packed.scales.float() * packed.of_row[:, None])[:, :, None]
        return values.view(rows, columns)
    scales = packed.scales[packed.of_row.long()]
    if packed.kind == "FP8_BLOCK":
        scales = scales.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    return packed.values.float() * scales


def pack_nvfp4(weight: Tensor, largest: float = 0.0) -> ScaledTensor:
    """Round a matrix to NVFP4 as ModelOpt does without calibration.

    largest: the magnitude that the float32 scale is made for; 0 = the matrix's own. Matrices that
    are one product elsewhere (gate and up) are given the larger of theirs.
    """
    rows, columns = weight.shape
    weight = weight.float()
    largest = largest or float(weight.abs().max())
    factor = torch.tensor(largest or E2M1_MAX * E4M3_MAX) / (E2M1_MAX * E4M3_MAX)
    blocks = weight.view(rows, columns // NVFP4_BLOCK, NVFP4_BLOCK)
    scales = blocks.abs().amax(dim=2) / (E2M1_MAX * factor)
    scales[scales == 0] = 1.0
    scales = scales.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = (blocks / (scales.float() * factor)[:, :, None]).view(rows, columns)
    codes = _nearest_e2m1(scaled.abs()) | (scaled < 0).to(torch.uint8) << 3
    values = codes[:, 0::2] | codes[:, 1::2] << 4
    return ScaledTensor("NVFP4", (rows, columns), values, scales, factor.expand(rows).clone())


def _nearest_e2m1(magnitude: Tensor) -> Tensor:
    """The number of the nearest E2M1 value, ties to the even number, as uint8.

    The steps between values are 1/2, 1 and 2. Where a step is the right one, counting in it gives
    the least number of the three.
    """
    halves = (2 * magnitude).round_()
    ones = magnitude.round().add_(2)
    twos = (magnitude / 2).round_().add_(4)
    return torch.minimum(halves.minimum(ones), twos).clamp_(max=7).to(torch.uint8)


def pack_fp8(weight: Tensor) -> ScaledTensor:
    """Round a matrix to e4m3 with a float32 scale for each square of 128."""
    rows, columns = weight.shape
    tall, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.zeros(tall * FP8_BLOCK, wide * FP8_BLOCK)
    padded[:rows, :columns] = weight
    squares = padded.view(tall, FP8_BLOCK, wide, FP8_BLOCK)
    scales = squares.abs().amax(dim=(1, 3)) / E4M3_MAX
    scales[scales == 0] = 1.0
    scaled = (squares / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return ScaledTensor("FP8_BLOCK", (rows, columns), values, scales, scale_rows(rows, FP8_BLOCK))


def scale_rows(rows: int, sharing: int, first: int = 0) -> Tensor:
    """[rows] int32: which of the scales from row `first` on is a row's, where `sharing` share one."""
    at = torch.arange(first, first + rows) // sharing
    return (at - first // sharing).to(torch.int32)


def column_block(kind: str) -> int:
    """Columns that cannot be cut apart; 0 = any can."""
    return _COLUMNS.get(kind, 0)
