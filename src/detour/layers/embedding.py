"""Token embedding and the output head, which may be one matrix (tied)."""

import torch
from torch import Tensor
from torch.nn import functional

from detour.layers.linear import project
from detour.layers.weight import Matrix, Piece, Site, empty
from detour.ops.gemm import select, unpack


class Embedding:
    """Rows of a matrix by token id. The vocabulary is shared among ranks by contiguous ranges."""

    def __init__(self, site: Site, name: str, vocab_size: int, width: int, *, tied: bool) -> None:
        share = site.group.share(vocab_size, "vocabulary entries")
        self.group = site.group
        self.rows = share.of(vocab_size)
        self.dtype = site.dtype
        shape = (vocab_size // share.parts, width)
        piece = Piece(f"{name}.weight", (vocab_size, width), rows=share)
        self.tied = tied
        # A matrix that only looks up rows takes no part in a product: it stays as it is read.
        self.table = site.matrix(shape, piece, keep=True) if tied else None
        self.plain = None if tied else site.tensor(shape, piece, spread=width**-0.5)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, width]."""
        if self.group.size == 1:
            return self._rows(tokens)
        local = tokens - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.stop - self.rows.start)
        found = self._rows(local.masked_fill(elsewhere, 0))
        return self.group.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def _rows(self, tokens: Tensor) -> Tensor:
        if self.plain is not None:
            return functional.embedding(tokens, self.plain.value)
        assert self.table is not None
        return unpack(select(self.table.weight, tokens), self.dtype)


class Head:
    """Hidden states to logits over the whole vocabulary."""

    def __init__(self, site: Site, name: str, embedding: Embedding, shape: tuple[int, int]) -> None:
        self.group = site.group
        self.no_bias = empty(site)
        self.matrix = _tied(embedding) if embedding.tied else _own(site, name, shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[S, width] -> [S, vocabulary] float32."""
        logits = project(self.matrix, hidden, self.no_bias)
        return self.group.all_gather(logits).to(torch.float32)


def _tied(embedding: Embedding) -> Matrix:
    assert embedding.table is not None
    return embedding.table


def _own(site: Site, name: str, shape: tuple[int, int]) -> Matrix:
    share = site.group.share(shape[0], "vocabulary entries")
    piece = Piece(f"{name}.weight", shape, rows=share)
    return site.matrix((shape[0] // share.parts, shape[1]), piece)
