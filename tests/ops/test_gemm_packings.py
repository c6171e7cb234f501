"""The packings that gemm names mean what GGUF means by them."""

import gguf
import numpy as np
import pytest
import torch

from detour.ops.gemm import GROUP_BYTES, random_weight, unpack


@pytest.mark.parametrize("packing", list(GROUP_BYTES))
def test_unpack_is_ggufs_dequantisation(packing):
    weight = random_weight(packing, 24, 96, torch.Generator().manual_seed(4))
    kind = gguf.GGMLQuantizationType[packing]
    wanted = gguf.quants.dequantize(weight.tensors[0].numpy(), kind)
    assert np.array_equal(unpack(weight, torch.float32).numpy(), wanted)
    assert 0.5 < float(np.std(wanted)) * 96**0.5 < 2
