"""Every op that touches cache rows, with every layout: it takes them and is right, or says why not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_ops import found_ops

from detour.errors import ConfigError
from detour.ops.device import probe
from detour.ops.kv_layout import (
    KVLayout,
    grouped_query,
    index_keys,
    index_keys_fp8,
    latent,
    latent_fp8_packed,
)
from detour.ops.op import Op
from detour.ops.route import Routes

LAYOUTS = (
    grouped_query(torch.bfloat16, 2, 64),
    grouped_query(torch.float8_e4m3fn, 2, 64),
    latent(torch.bfloat16, 512, 64),
    latent(torch.float32, 512, 64),
    latent_fp8_packed(512, 64),
    index_keys(torch.float32, 128),
    index_keys_fp8(128),
)
TAKEN = {
    "attention": "grouped_query",
    "kv_write": "grouped_query",
    "sparse_mla": "latent latent_fp8_packed",
    "dense_mla": "latent latent_fp8_packed",
    "latent_write": "latent latent_fp8_packed",
    "index_key": "index_keys index_keys_fp8",
    "index_query": "index_keys index_keys_fp8",
    "index_scores": "index_keys index_keys_fp8",
}
FACTS = {
    "dtype": torch.bfloat16,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "rank": 512,
    "rope": 64,
    "width": 128,
}


def first_need(op: Op) -> dict[str, Any]:
    return dict(next(iter(op.inputs(torch.device("cpu"))))[0])


def pairs() -> Iterator[tuple[Op, KVLayout]]:
    for op in found_ops():
        if "layout" in first_need(op):
            yield from ((op, layout) for layout in LAYOUTS)


def test_every_op_of_cache_rows_is_in_the_table():
    assert {op.name for op, _ in pairs()} == set(TAKEN)


@pytest.mark.parametrize(("op", "layout"), pairs(), ids=lambda one: one.name)
def test_a_layout_is_taken_or_refused_with_a_sentence(op: Op, layout: KVLayout):
    """On a CPU; test_ops.py runs each backend on the layouts that it takes."""
    need = {name: FACTS[name] for name in first_need(op) if name in FACTS} | {"layout": layout}
    routes = Routes(probe("cpu"), {}, strict=False)
    if layout.name in TAKEN[op.name].split():
        assert routes.route(op, need).backends[-1] is op.reference
        return
    with pytest.raises(ConfigError) as caught:
        routes.route(op, need)
    assert caught.value.message.startswith(f"{op.name} cannot be computed as asked: it takes ")
    assert caught.value.message.endswith(f"not {layout.name}.")


def test_rows_that_do_not_divide_into_blocks_cannot_be_packed():
    need = {**FACTS, "rank": 192, "layout": latent_fp8_packed(192, 64)}
    for op, layout in pairs():
        if layout is LAYOUTS[4] and layout.name in TAKEN[op.name].split():
            with pytest.raises(ConfigError, match="whole blocks of 128, not 192"):
                Routes(probe("cpu"), {}, strict=False).route(op, need)
