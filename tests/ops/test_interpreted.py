"""Triton kernels against their references on a CPU, through Triton's interpreter, at small sizes.

bfloat16 is left to the GPU (the interpreter's products of it are wrong), and so are sizes: what is
shown here is the arithmetic and the indexing, not the layouts a compiler chooses.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_ops import compare, copied, found_ops, outputs

from detour.ops.device import Device, probe
from detour.ops.kv_layout import latent
from detour.ops.mla import sparse_mla
from detour.ops.op import Need, Op
from detour.ops.triton_device import INTERPRETER

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, at -inf and at masked lanes
]

CPU = torch.device("cpu")
OPS = [op for op in found_ops() if "triton" in op.discover()]


def interpreter() -> Device:
    device = probe("cpu")
    return replace(device, instructions=device.instructions | {INTERPRETER})


def rounds_right(need: Need) -> bool:
    """The interpreter cuts what it stores as bfloat16, and e4m3 that would round up to a power."""
    stored = need["layout"].dtype if "layout" in need else need["dtype"]
    return not {need["dtype"], stored} & {torch.bfloat16, torch.float8_e4m3fn}


def usable(op: Op) -> Iterator[tuple[Need, tuple[Any, ...]]]:
    for need, arguments in op.inputs(CPU):
        if rounds_right(need) and not op.backends["triton"].reasons(interpreter(), need):
            yield need, arguments


def check(op: Op, need: Need, arguments: tuple[Any, ...]) -> None:
    theirs, ours = copied(arguments), copied(arguments)
    expected = outputs(op, op.call(op.reference, theirs), theirs)
    got = outputs(op, op.call(op.backends["triton"], ours), ours)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if one.dtype == torch.float8_e4m3fn:
            # The interpreter loses the carry of a number that rounds up to a power of two.
            assert (one.float() != other.float()).float().mean() < 0.05
        else:
            compare(one, other, op.tolerance[need["dtype"]], f"{op.name} {need}")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernel_equals_reference(op: Op):
    check(op, *next(usable(op)))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernel_equals_reference_on_every_input(op: Op):
    for need, arguments in usable(op):
        check(op, need, arguments)


def test_a_cpu_that_interprets_nothing_is_refused():
    for op in OPS:
        for need, _ in op.inputs(CPU):
            assert op.backends["triton"].reasons(probe("cpu"), need)
            break


def test_every_glm_op_has_a_kernel():
    assert {
        "moe", "moe_fp8", "moe_nvfp4", "gemm_scaled", "sparse_mla", "dense_mla", "index_scores",
        "index_topk", "index_key",
        "index_query", "latent_write", "routing", "rms_norm", "add_rms_norm", "rope", "silu_mul",
    } <= {op.name for op in OPS}  # fmt: skip


def test_float32_queries_do_not_meet_packed_rows_in_float16():
    need = {"dtype": torch.float32, "heads": 8, "rank": 512, "rope": 64}
    layouts = {"latent": latent(torch.float32, 512, 64)}
    backend = sparse_mla.backends["triton"]
    assert not backend.reasons(interpreter(), need | {"layout": layouts["latent"]})
    for found, arguments in sparse_mla.inputs(CPU):
        if found["layout"].name == "latent_fp8_packed":
            wrong = found | {"dtype": torch.float32}
            assert "float16" in backend.reasons(interpreter(), wrong)[0]
            assert arguments[1].dtype == torch.uint8
            break
