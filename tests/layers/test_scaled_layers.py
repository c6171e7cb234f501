"""Layers on packed weights compute what they compute on the weights that these mean."""

import logging

import pytest
import torch
from scaled_files import PACKS, pack_folder, plain_of, rewrite
from test_shards import BIASED, PartialGroup, sum_over_ranks
from tiny import write_tiny

from detour.errors import CheckpointError
from detour.layers.experts import Experts
from detour.layers.mlp import GatedMLP
from detour.layers.weight import Site
from detour.loading.checkpoint import open_checkpoint
from detour.ops.device import probe
from detour.ops.gemm import SCALED
from detour.ops.route import Routes

HIDDEN, WIDTH = 160, 272
SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "head_dim": 40}
MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": WIDTH}
EXPERTS = "model.layers.0.mlp.experts"


def mlp(one: Site) -> GatedMLP:
    return GatedMLP(one, "model.layers.0.mlp", HIDDEN, WIDTH, bias=True)


class Routed:
    """Experts with a fixed choice: each token takes two, with weights of its own."""

    def __init__(self, one: Site) -> None:
        self.experts = Experts(one, EXPERTS, HIDDEN, WIDTH, 6)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.arange(len(x))
        chosen = torch.stack([first % 6, (first + 2) % 6], dim=1)
        return self.experts(x, torch.linspace(0.2, 1.5, 2 * len(x)).view(-1, 2), chosen)


def inputs() -> torch.Tensor:
    return torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))


def site(rank: int = 0, size: int = 1, **more) -> Site:
    device = probe("cpu")
    group = PartialGroup(rank, size)
    return Site(device, torch.float32, Routes(device, {}, strict=False), group, **more)


def load(folder, build) -> tuple:
    one = site()
    layer = build(one)
    with torch.inference_mode():
        one.load(open_checkpoint(folder), lambda name: True, lambda amount: None)
    return layer, one


@pytest.mark.parametrize("form", PACKS)
@pytest.mark.parametrize(("build", "changes"), [(mlp, BIASED), (Routed, MOE)], ids=["mlp", "moe"])
def test_packed_is_plain(tmp_path, form, build, changes):
    """Weights stay packed in memory, and ranks whose columns are whole blocks add up."""
    folder = write_tiny(tmp_path / "plain", **SIZES, **changes)
    packed = pack_folder(folder, tmp_path / "packed", PACKS[form])
    x = inputs()
    whole = sum_over_ranks(plain_of(packed), 1, build, x)
    assert torch.allclose(sum_over_ranks(packed, 1, build, x), whole, atol=1e-5)
    layer, one = load(packed, build)
    held = sum(parameter.nbytes for parameter in one.parameters)
    numbers = sum(parameter.numel for parameter in one.parameters)
    assert held < (0.8 if form.startswith("nvfp4") else 1.4) * numbers
    if form in ("fp8-tensor", "fp8-channel"):
        assert torch.allclose(sum_over_ranks(packed, 2, build, x), whole, atol=1e-5)
    else:  # the middle of 272 columns is in the middle of a block, be it of 16 or of 128
        with pytest.raises(CheckpointError, match=r"down_proj\.weight.*columns 0 to 136"):
            sum_over_ranks(packed, 2, build, x)


@pytest.mark.parametrize("form", PACKS)
@pytest.mark.parametrize("build", [mlp, Routed])
def test_ranks_of_whole_blocks_add_up(tmp_path, form, build, monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 256)
    changes = BIASED if build is mlp else MOE | {"moe_intermediate_size": 256}
    sizes = SIZES | {"intermediate_size": 256}
    folder = write_tiny(tmp_path / "plain", **sizes, **changes)
    packed = pack_folder(folder, tmp_path / "packed", PACKS[form])
    x = inputs()
    whole = sum_over_ranks(plain_of(packed), 1, build, x)
    assert torch.allclose(sum_over_ranks(packed, 2, build, x), whole, atol=1e-5)


def chosen_op(layer: Routed) -> str:
    return layer.experts.weights.route.op.name


@pytest.mark.parametrize(
    ("form", "chosen", "op"),
    [
        ("nvfp4-modelopt", lambda m: True, "moe_nvfp4"),
        ("nvfp4-modelopt", lambda m: ".experts." not in m, "moe"),
        ("nvfp4-modelopt", lambda m: ".experts.3." in m, "moe"),
        ("nvfp4-modelopt", lambda m: "down" in m, "moe"),
        ("fp8-block", lambda m: True, "moe_fp8"),
        ("fp8-channel", lambda m: "up_proj" in m, "moe"),
    ],
)
def test_what_experts_are_packed_in_chooses_the_op(tmp_path, caplog, form, chosen, op):
    """What is not packed alike in all of them is unpacked, and the log says so."""
    folder = write_tiny(tmp_path / "plain", **SIZES, **MOE)
    packed = pack_folder(folder, tmp_path / "packed", PACKS[form], chosen)
    with caplog.at_level(logging.INFO):
        layer, _ = load(packed, Routed)
    assert chosen_op(layer) == op
    mixed = op == "moe" and any(chosen(f"{EXPERTS}.3.{part}_proj") for part in ("up", "down"))
    assert ("unpacked" in caplog.text) == mixed
    expected, _ = load(plain_of(packed), Routed)
    with torch.inference_mode():
        assert torch.allclose(layer(inputs()), expected(inputs()), atol=1e-5)


def test_gate_and_up_keep_scales_of_their_own(tmp_path):
    """Ten times larger gates: a shared scale would change the result."""
    folder = write_tiny(tmp_path / "plain", **SIZES, **MOE)

    def enlarge(tensors):
        for name in tensors:
            if "gate_proj" in name:
                tensors[name] *= 10

    packed = pack_folder(rewrite(folder, enlarge), tmp_path / "x", PACKS["nvfp4-modelopt"])
    layer, _ = load(packed, Routed)
    factors = layer.experts.weights.tensors[2]
    assert factors.shape == (6, 2) and (factors[:, 0] > 5 * factors[:, 1]).all()
    expected, _ = load(plain_of(packed), Routed)
    with torch.inference_mode():
        assert torch.allclose(layer(inputs()), expected(inputs()), atol=1e-4)


def test_a_fused_matrix_of_two_packings_is_unpacked(tmp_path, caplog):
    folder = write_tiny(tmp_path / "plain", **SIZES, **BIASED)
    chosen = {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"}
    packed = pack_folder(folder, tmp_path / "x", PACKS["fp8-block"], chosen.__contains__)
    with caplog.at_level(logging.INFO):
        layer, _ = load(packed, mlp)
    assert layer.gate_up.matrix.weight.packing == "dense" or layer.gate_up.matrix.stored
    assert "unpacked" in caplog.text and "gate_proj" in caplog.text
    expected, _ = load(plain_of(packed), mlp)
    with torch.inference_mode():
        assert torch.allclose(layer(inputs()), expected(inputs()), atol=1e-5)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("build", [mlp, Routed])
def test_dummy_weights_take_what_real_ones_would(kind, build):
    one = site(expected=lambda module: kind if "proj" in module else "")
    layer = build(one)
    with torch.inference_mode():
        one.fill(3, lambda amount: None)
        out = layer(inputs())
    assert torch.isfinite(out).all() and 0.05 < out.std() < 20
    held = sum(parameter.nbytes for parameter in one.parameters)
    numbers = sum(parameter.numel for parameter in one.parameters)
    assert held < (0.8 if kind == "NVFP4" else 1.4) * numbers
