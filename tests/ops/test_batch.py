"""Parts of a batch: the same tokens over the same pages, as a batch of their own."""

import pytest
import torch

from detour.ops.attention import make_batch
from detour.ops.batch import cut
from detour.ops.index_scores import index_scores, make_inputs
from detour.ops.kv_layout import index_keys

CPU = torch.device("cpu")
ROWS = [(7, 5), (30, 1), (0, 9), (3, 1)]  # 16 tokens


@pytest.mark.parametrize(
    ("first", "last", "counts", "lengths"),
    [
        (0, 16, [5, 1, 9, 1], [12, 31, 9, 4]),
        (0, 3, [3], [10]),
        (2, 5, [3], [12]),
        (4, 8, [1, 1, 2], [12, 31, 2]),
        (6, 15, [9], [9]),
        (14, 16, [1, 1], [9, 4]),
        (15, 16, [1], [4]),
    ],
)
def test_rows_of_a_part(first, last, counts, lengths):
    batch = make_batch(ROWS, 4, CPU, torch.Generator().manual_seed(1))
    part = cut(batch, first, last)
    assert part.counts.tolist() == counts
    assert part.lengths.tolist() == lengths == part.kv_lengths.tolist()
    assert part.row_starts.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    assert part.row_of_token.tolist() == torch.arange(len(counts)).repeat_interleave(
        torch.tensor(counts)
    ).tolist()  # fmt: skip
    assert torch.equal(part.positions, batch.positions[first:last])
    assert part.page_table.shape == (len(counts), -(-max(lengths) // 4))
    pages = part.page_table[part.row_of_token, part.positions // 4].long()
    assert torch.equal(pages * 4 + part.positions % 4, part.write_slots)
    assert len(part.logits_at) == 0


def test_scores_of_parts_are_those_of_the_whole():
    source = torch.Generator().manual_seed(2)
    layout = index_keys(torch.float32, 32)
    batch, _, *tensors, cache = make_inputs(ROWS, 16, 32, 4, layout, torch.float32, CPU, source)
    whole = index_scores.call(index_scores.reference, (batch, layout, *tensors, cache))
    for first in range(0, 16, 3):
        some = slice(first, min(first + 3, 16))
        part = cut(batch, some.start, some.stop)
        own = tuple(tensor[some] for tensor in tensors)
        got = index_scores.call(index_scores.reference, (part, layout, *own, cache))
        assert torch.allclose(got, whole[some, : got.shape[1]])
