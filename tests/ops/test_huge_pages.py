"""Settled memory: copies that are right, aligned, and side by side."""

import sys

import psutil
import pytest
import torch

from detour.ops.huge_pages import ALIGNMENT, CHUNK, settle, zeros


def test_settled_tensors_are_copies_side_by_side():
    pieces = [torch.arange(n, dtype=torch.float32) for n in (3, 100, 7)]
    settled = [settle(piece) for piece in pieces]
    for piece, own in zip(pieces, settled, strict=True):
        assert torch.equal(own.view(torch.float32), piece)
        assert own.data_ptr() % ALIGNMENT == 0
    assert len({own.untyped_storage().data_ptr() for own in settled}) <= 2


def test_tensors_of_inference_mode_and_others_settle_in_turn():
    with torch.inference_mode():
        settled = settle(torch.ones(5))
    assert torch.equal(settle(settled), settled)


def test_a_piece_larger_than_a_chunk_settles_alone():
    large = torch.ones(CHUNK + 1, dtype=torch.uint8)
    assert torch.equal(settle(large), large)


def test_zeros_are_zeros_and_writable():
    for dtype, shape in ((torch.float32, (3, 7)), (torch.bfloat16, (1200, 1000))):
        made = zeros(shape, dtype)
        assert made.shape == shape
        assert made.dtype == dtype
        assert not made.any()
        made[1] = 2
        assert made.sum(dtype=torch.float64) == 2 * shape[1]


def test_zeros_take_no_memory_before_they_are_written():
    if sys.platform != "linux":
        pytest.skip("only Linux hands out untouched memory so")
    before = psutil.Process().memory_info().rss
    kept = zeros((512 << 20,), torch.uint8)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert kept[-1] == 0
