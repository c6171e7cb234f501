"""What fits: pages, memory, threads, and the dtype a device is given."""

import os

import pytest
import torch
from step_driver import make_runner

from detour.errors import ConfigError
from detour.ops import native
from detour.ops.device import Device, probe
from detour.ops.kv_layout import KVLayout, grouped_query
from detour.ops.route import Routes
from detour.worker.build import choose_dtype
from detour.worker.capacity import _fastest_threads
from detour.worker.kv_cache import KVCache, available_memory, bytes_per_token, pages_for

SPEC = [(grouped_query(torch.float32, 2, 8),)] * 3
COST = 3 * 2 * 2 * 8 * 4  # bytes per token


def test_bytes_per_token():
    assert bytes_per_token(SPEC) == COST


def test_pages_are_what_is_wanted_or_what_fits():
    assert pages_for(10**9, SPEC, 16, wanted_tokens=100) == 7 + 1
    assert pages_for(5 * 16 * COST, SPEC, 16, wanted_tokens=1000) == 5
    with pytest.raises(ConfigError, match="KV cache"):
        pages_for(16 * COST, SPEC, 16, wanted_tokens=1000)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (grouped_query(torch.bfloat16, 2, 8), (5, 4, 2, 8)),
        (KVLayout("latent", torch.bfloat16, 1, 576, 1), (5, 4, 576)),
        (KVLayout("latent_fp8_packed", torch.uint8, 1, 656, 1), (5, 4, 656)),
        (KVLayout("index_keys_fp8", torch.uint8, 1, 132, 1), (5, 4, 132)),
    ],
)
def test_cache_tensors_follow_their_layout(layout, shape):
    cache = KVCache([(layout,)], 5, 4, torch.device("cpu"))
    assert [tensor.shape for tensor in cache.layers[0]] == [shape] * layout.tensors
    assert cache.nbytes == 5 * 4 * layout.bytes_per_token


def test_available_memory_heeds_the_containers_limit(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:  500 kB\n")
    assert available_memory(tmp_path) == 500 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 500 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000


@pytest.mark.parametrize(
    ("wish", "checkpoint", "kind", "instructions", "dtype"),
    [
        ("auto", "bfloat16", "cpu", {"avx2"}, torch.float32),
        ("auto", "bfloat16", "cpu", {"avx512_bf16"}, torch.bfloat16),
        ("auto", "float32", "cpu", {"amx", "avx512_bf16"}, torch.float32),
        ("auto", "float16", "cuda", set(), torch.float16),
        ("auto", "", "cuda", set(), torch.bfloat16),
        ("float16", "bfloat16", "cpu", {"avx2"}, torch.float16),
    ],
)
def test_dtype(wish, checkpoint, kind, instructions, dtype):
    device = Device(torch.device(kind), kind, (0, 0), 0, 2, frozenset(instructions))
    assert choose_dtype(wish, checkpoint, device) is dtype


def test_threads_are_measured(tiny_folder):
    runner = make_runner(tiny_folder)
    before = torch.get_num_threads()
    routes = Routes(probe("cpu"), {}, strict=False)
    try:
        assert 1 <= _fastest_threads(runner, routes) <= os.cpu_count()
    finally:
        torch.set_num_threads(before)
        native.set_threads(0)
