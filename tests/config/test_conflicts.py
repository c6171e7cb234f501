"""Each pair of options that does not go together has its sentence; the defaults have none."""

import pytest

from detour.config.conflicts import conflicts
from detour.config.options import Config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "--disable-radix-cache"),
        ({"disable_cuda_graph": True, "cuda_graph_max_bs": 8}, "--disable-cuda-graph leaves"),
        ({"cuda_graph_max_bs": 64, "max_running_requests": 8}, "larger graphs"),
        ({"max_total_tokens": 64, "context_length": 128}, "less than one sequence"),
        ({"max_prefill_tokens": 99}, "--chunked-prefill-size -1"),
        ({"device": "cpu", "cuda_graph_bs": "1,2"}, "no CUDA graphs"),
        ({"device": "cuda", "threads": 2}, "--threads"),
    ],
)
def test_conflict(values, words):
    (sentence,) = conflicts(Config(**values))
    assert words in sentence and sentence.endswith(".")


def test_none():
    assert conflicts(Config()) == []
    assert conflicts(Config(schedule_policy="lpm", chunked_prefill_size=-1)) == []
    assert conflicts(Config(max_prefill_tokens=99, chunked_prefill_size=-1)) == []
