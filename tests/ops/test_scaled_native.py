"""Packed weights on a CPU: a token's result is the same bits alone and among others."""

import pytest
import torch

from detour.ops.device import probe
from detour.ops.gemm import SCALED
from detour.ops.gemm_scaled import gemm_scaled, random_scaled
from detour.ops.gemm_scaled import native as gemm_module
from detour.ops.moe_fp8 import moe_fp8, random_experts
from detour.ops.moe_nvfp4 import make_inputs, moe_nvfp4

CPU = probe("cpu")
NO_BIAS = torch.zeros(0)


def source(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def native(op, need):
    backend = op.discover()["native"]
    if why := backend.reasons(CPU, need):
        pytest.skip("; ".join(why))
    return backend


@pytest.mark.parametrize("packing", SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_product(packing, dtype, monkeypatch):
    need = {"packing": packing, "dtype": dtype, "rows": 200, "columns": 160}
    backend = native(gemm_scaled, need)
    monkeypatch.setattr(gemm_module, "EXPANDED", 160 * 70)  # parts of 64 rows
    weight = backend.plan(random_scaled(packing, 200, 160, source()))
    x = torch.randn(70, 160, generator=source(2)).to(dtype)
    whole = backend.run(weight, x, NO_BIAS)
    assert torch.isfinite(whole).all()
    for first, last in ((0, 1), (3, 4), (69, 70), (5, 22), (0, 33)):
        assert torch.equal(backend.run(weight, x[first:last], NO_BIAS), whole[first:last])


def routed(form: str, dtype: torch.dtype):
    """The op and its arguments, for 40 tokens among 12 experts."""
    if form == "nvfp4":
        return moe_nvfp4, make_inputs(40, 64, 32, 12, 3, dtype, torch.device("cpu"), seed=4)
    x, *_, weights, experts = make_inputs(40, 64, 32, 12, 3, dtype, torch.device("cpu"), seed=4)
    up = random_experts((12, 64, 64), 1, 1, source(5))
    return moe_fp8, (x, *up, *random_experts((12, 64, 32), 1, 1, source(6)), weights, experts)


@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_routed_experts(form, dtype):
    op, (x, *packed, weights, experts) = routed(form, dtype)
    backend = native(op, {"dtype": dtype, "experts": 12, "hidden": 64, "width": 32})
    whole = backend.run(x, *packed, weights, experts)
    assert torch.isfinite(whole).all()
    for first, last in ((0, 1), (7, 8), (3, 20), (39, 40)):
        some = slice(first, last)
        assert torch.equal(backend.run(x[some], *packed, weights[some], experts[some]), whole[some])
    assert backend.run(x[:0], *packed, weights[:0], experts[:0]).shape == (0, 64)
