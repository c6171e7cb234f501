"""NVFP4 and FP8 as they lie in checkpoints: unpacked by the definition, packed to the nearest value."""

import pytest
import torch

from detour.loading.scaled import (
    E2M1,
    KINDS,
    ScaledTensor,
    pack_fp8,
    pack_nvfp4,
    scale_rows,
    unpack_scaled,
)


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=source) * torch.rand(rows, 1, generator=source)


def test_nvfp4_means_what_its_bits_say():
    """Element by element: the nibble's sign and number, the block's scale, the row's factor."""
    values = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor([0.5, 448.0, 2.0**-9, 1.75]).repeat(8, 1).to(torch.float8_e4m3fn)
    factor = torch.linspace(0.01, 3.0, 8)
    got = unpack_scaled(ScaledTensor("NVFP4", (8, 64), values, scales, factor))
    for row in range(8):
        for column in range(64):
            nibble = int(values[row, column // 2]) >> 4 * (column % 2) & 15
            value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
            scale = scales[row, column // 16].float() * factor[row]
            assert got[row, column] == value * scale


def test_nvfp4_rounds_to_the_nearest_and_ties_to_even():
    grid = torch.tensor(E2M1)
    middle = (grid[1:] + grid[:-1]) / 2
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    row = torch.cat([grid, middle, torch.tensor([-5.5])])  # its largest, 6, makes all scales 1
    packed = pack_nvfp4(torch.stack([row, -row]), largest=6.0 * 448 / 448)
    wanted = torch.tensor([*E2M1, *even, -6.0])
    assert torch.equal(unpack_scaled(packed), torch.stack([wanted, -wanted]))


def test_nvfp4_keeps_every_weight_within_half_a_step():
    given = weight(64, 96)
    packed = pack_nvfp4(given)
    error = (unpack_scaled(packed) - given).abs().view(64, 6, 16)
    scale = (packed.scales.float() * packed.of_row[:, None])[:, :, None]
    size = given.abs().view(64, 6, 16) / scale
    step = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0))
    # A block's scale is rounded to three bits, so that its largest may lie beyond 6.
    bound = (step / 2).where(size <= 6, size - 6) + 1e-5
    assert (error <= bound * scale).all()
    relative = (unpack_scaled(packed) - given).norm() / given.norm()
    assert 0.05 < relative < 0.12


def test_nvfp4_of_a_shared_largest_has_its_factor():
    small, large = weight(4, 32), 7 * weight(4, 32, 1)
    largest = float(torch.cat([small, large]).abs().max())
    packed = [pack_nvfp4(one, largest) for one in (small, large)]
    assert torch.equal(packed[0].of_row, packed[1].of_row)
    assert packed[0].of_row[0] == torch.tensor(largest) / (6 * 448)


@pytest.mark.parametrize("shape", [(128, 256), (200, 136), (1, 16), (127, 129)])
def test_fp8_blocks_are_torchs_casts(shape):
    given = weight(*shape)
    packed = pack_fp8(given)
    got = unpack_scaled(packed)
    assert packed.scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for top in range(0, shape[0], 128):
        for left in range(0, shape[1], 128):
            square = given[top : top + 128, left : left + 128]
            scale = square.abs().max() / 448
            cast = (square / scale).to(torch.float8_e4m3fn)
            assert torch.equal(got[top : top + 128, left : left + 128], cast.float() * scale)
    assert (got - given).norm() / given.norm() < 0.04


def test_zeros_stay_zeros():
    given = weight(130, 144)
    given[:, :16] = 0
    given[:128, :128] = 0
    assert (unpack_scaled(pack_fp8(given))[given == 0] == 0).all()
    assert (unpack_scaled(pack_nvfp4(given))[given == 0] == 0).all()
    assert (unpack_scaled(pack_nvfp4(torch.zeros(2, 16))) == 0).all()


def test_rows_find_their_scale_after_a_cut():
    assert scale_rows(5, 2).tolist() == [0, 0, 1, 1, 2]
    assert scale_rows(4, 128, first=127).tolist() == [0, 1, 1, 1]
    assert scale_rows(3, 1, first=9).tolist() == [0, 1, 2]
    assert len(KINDS) == 4
