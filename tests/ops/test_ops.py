"""Every backend of every op against the op's reference, on inputs of the op's own making.

An op joins by existing: folders of detour.ops are listed, and every Op in them is found.
"""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import detour.ops
from detour.ops.device import probe
from detour.ops.op import Op


def found_ops() -> list[Op]:
    ops = {}
    for module in pkgutil.iter_modules(detour.ops.__path__):
        if module.ispkg:
            package = importlib.import_module(f"detour.ops.{module.name}")
            for value in vars(package).values():
                if isinstance(value, Op) and value.package == package.__name__:
                    ops[value.name] = value
    return list(ops.values())


CASES = [
    pytest.param(op, name, device, id=f"{op.name}-{name}-{device}", marks=marks)
    for op in found_ops()
    for name in op.discover() | op.missing
    for device, marks in (("cpu", ()), ("cuda", (pytest.mark.gpu,)))
]


def outputs(op: Op, returned: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a call gave: the tensors it returned, then those it was to write."""
    many = returned if isinstance(returned, tuple | list) else (returned,)
    tensors = [value for value in many if isinstance(value, torch.Tensor)]
    return tensors + [arguments[place] for place in op.writes]


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each call gets tensors of its own, strides kept, since ops may write to their arguments."""
    return tuple(
        torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        ).copy_(value)
        if isinstance(value, torch.Tensor)
        else value
        for value in arguments
    )


@pytest.mark.parametrize(("op", "name", "device"), CASES)
def test_backend_equals_reference(op: Op, name: str, device: str):
    if name in op.missing:
        pytest.skip(op.missing[name])
    backend = op.discover()[name]
    refused: list[str] = []
    served = 0
    for need, arguments in op.inputs(torch.device(device)):
        reasons = backend.reasons(probe(device), need)
        refused += reasons
        if reasons:
            continue
        served += 1
        theirs, ours = copied(arguments), copied(arguments)
        with torch.inference_mode():
            expected = outputs(op, op.call(op.reference, theirs), theirs)
            got = outputs(op, op.call(backend, ours), ours)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            compare(one, other, op.tolerance[need["dtype"]], f"{op.name}/{name} {need}")
    if not served:
        pytest.skip("; ".join(sorted(set(refused))))


def compare(got: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str) -> None:
    """||got - expected|| / ||expected|| for floating tensors, equality for all others."""
    if not got.dtype.is_floating_point or tolerance == 0:
        assert torch.equal(got, expected), where
        return
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    assert error <= tolerance, f"{where}: relative error {error:.2e} > {tolerance}"
