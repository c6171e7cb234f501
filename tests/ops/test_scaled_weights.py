"""What the ops make of scaled weights is what the checkpoint's reader makes of them."""

import pytest
import torch

from detour.loading.scaled import ScaledTensor, pack_nvfp4, unpack_scaled
from detour.ops import gemm_scaled as module
from detour.ops.gemm import SCALED, select, unpack
from detour.ops.gemm_scaled import gemm_scaled, random_scaled
from detour.ops.scaled import unpack_nvfp4


@pytest.mark.parametrize("packing", SCALED)
@pytest.mark.parametrize("shape", [(200, 256), (130, 160)])
def test_unpack_is_the_readers(packing, shape):
    weight = random_scaled(packing, *shape, torch.Generator().manual_seed(5))
    stored = ScaledTensor(packing, shape, *weight.tensors)
    expected = unpack_scaled(stored)
    assert torch.equal(unpack(weight, torch.float32), expected)
    assert torch.equal(unpack(weight, torch.bfloat16), expected.bfloat16())
    numbers = torch.tensor([129, 3, 3, 0])
    assert torch.equal(unpack(select(weight, numbers), torch.float32), expected[numbers])
    assert torch.equal(
        unpack(select(weight, slice(7, 129)), torch.float32), expected[slice(7, 129)]
    )


def test_unpack_of_many_experts_at_once():
    given = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1))
    packed = [pack_nvfp4(one) for one in given]
    values, scales = (torch.stack([one[place] for one in packed]) for place in (2, 3))
    factors = torch.stack([one.of_row[0] for one in packed])[:, None, None]
    expected = torch.stack([unpack_scaled(one) for one in packed])
    assert torch.equal(unpack_nvfp4(values, scales, factors), expected)


def test_the_reference_expands_a_bounded_part(monkeypatch):
    weight = random_scaled("FP8_BLOCK", 300, 128, torch.Generator().manual_seed(2))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    whole = gemm_scaled.reference.run(weight, x, torch.ones(300))
    seen = []
    monkeypatch.setattr(module, "UNPACKED", 128 * 70)
    monkeypatch.setattr(
        module, "unpack", lambda part, dtype: seen.append(part) or unpack(part, dtype)
    )
    parts = gemm_scaled.reference.run(weight, x, torch.ones(300))
    assert [part.rows for part in seen] == [70, 70, 70, 70, 20]
    assert torch.allclose(parts, whole, atol=1e-5)
