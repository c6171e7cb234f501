"""What the one test over all ops cannot ask of GLM-5's: packed bytes, open scores, cut rows.

On a CPU the kernels run through Triton's interpreter, on a GPU as they are compiled.
"""

import pytest
import torch
from test_ops import compare, copied

from detour.ops.index_key import index_key, key_inputs, read_index
from detour.ops.index_scores import index_scores, make_inputs
from detour.ops.index_topk import index_topk
from detour.ops.index_topk import make_inputs as topk_inputs
from detour.ops.kv_layout import index_keys_fp8
from detour.ops.latent_write import latent_write
from detour.ops.latent_write import make_inputs as latent_inputs
from detour.ops.mla import unpack_latent

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def nearly_equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """A right writer may round one number in a hundred the other way; the interpreter, which loses
    the carry of a number that rounds up to a power of two, gets one in twenty wrong by half."""
    different = (got - expected).abs() > 1e-6 * expected.abs()
    return bool(different.float().mean() < (0.01 if got.is_cuda else 0.05))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_latent_rows_hold_what_the_reference_writes(device: str):
    latent_write.discover()
    for need, arguments in latent_inputs(torch.device(device), packed=True):
        if device == "cpu" and need["dtype"] == torch.bfloat16:
            continue
        theirs, ours = copied(arguments), copied(arguments)
        latent_write.reference.run(*theirs)
        latent_write.backends["triton"].run(*ours)
        shape = arguments[-1]
        got, expected = (unpack_latent(a[6], shape) for a in (ours, theirs))
        assert nearly_equal(got, expected), need


@pytest.mark.parametrize("device", DEVICES)
def test_packed_index_keys_hold_what_the_reference_writes(device: str):
    index_key.discover()
    for need, arguments in key_inputs(torch.device(device), packed=True):
        if device == "cpu" and need["dtype"] == torch.bfloat16:
            continue
        theirs, ours = copied(arguments), copied(arguments)
        index_key.reference.run(*theirs)
        index_key.backends["triton"].run(*ours)
        slots = torch.arange(ours[7].shape[0] * ours[7].shape[1], device=device)
        got, expected = (read_index(a[7], slots, arguments[-1]) for a in (ours, theirs))
        assert nearly_equal(got, expected), need


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_rows_of_different_lengths(device: str):
    index_scores.discover()
    rows = [(70, 1), (0, 5), (127, 1), (30, 9)]
    source = torch.Generator().manual_seed(3)
    where = torch.device(device)
    arguments = make_inputs(rows, 16, 32, 16, index_keys_fp8(32), torch.float32, where, source)
    expected = index_scores.call(index_scores.reference, arguments)
    got = index_scores.call(index_scores.backends["triton"], arguments)
    positions = arguments[0].positions
    seen = torch.arange(expected.shape[1], device=where) <= positions[:, None]
    compare(got[seen], expected[seen], 1e-5 if device == "cpu" else 1e-3, "index_scores")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("segment", "chunk"), [(32, 32), (64, 32), (128, 64), (128, 128)])
def test_selection_does_not_depend_on_segments(segment: int, chunk: int, device: str):
    """Ties across segments included: every third row of the inputs is full of them."""
    index_topk.discover()
    names = index_topk.backends["triton"].run.__globals__
    lengths = [128, 17, 100, 33, 0]
    arguments = topk_inputs(lengths, 128, 16, 16, torch.device(device), segment)
    cut = names["Cut"](segment, chunk)
    slots, counts = names["launch"](cut, *arguments)
    expected_slots, expected_counts = index_topk.reference.run(*arguments)
    assert torch.equal(slots, expected_slots)
    assert torch.equal(counts, expected_counts)
