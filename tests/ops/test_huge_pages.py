"""Settled memory: copies that are right, aligned, and side by side."""

import torch

from detour.ops.huge_pages import ALIGNMENT, CHUNK, ask_huge, settle


def test_settled_tensors_are_copies_side_by_side():
    pieces = [torch.arange(n, dtype=torch.float32) for n in (3, 100, 7)]
    settled = [settle(piece) for piece in pieces]
    for piece, own in zip(pieces, settled, strict=True):
        assert torch.equal(own.view(torch.float32), piece)
        assert own.data_ptr() % ALIGNMENT == 0
    assert len({own.untyped_storage().data_ptr() for own in settled}) <= 2


def test_a_piece_larger_than_a_chunk_settles_alone():
    large = torch.ones(CHUNK + 1, dtype=torch.uint8)
    assert torch.equal(settle(large), large)


def test_asking_changes_no_number():
    rows = torch.randn(1 << 20)
    kept = rows.clone()
    assert ask_huge(rows) is rows
    assert torch.equal(rows, kept)
