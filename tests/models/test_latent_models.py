"""Latent and sparse attention beyond what every model is tested for: long answers, packed caches,
selections in parts, and contexts too short to be sparse."""

import logging

import pytest
import torch
from oracles import LATENT, SIGMOID_MOE, SPARSE, expected, greedy, prompt, write_oracle
from step_driver import Driver, make_runner
from tiny_glm import MODELS, TOP_K, write_tiny_glm
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as theirs

from detour.errors import ConfigError
from detour.layers import indexer
from detour.loading.checkpoint import open_checkpoint
from detour.ops import native
from detour.ops.device import probe
from detour.ops.kv_layout import latent_fp8_packed
from detour.ops.mla import LatentShape, pack_latent, unpack_latent

SHARED = {**SPARSE, "num_hidden_layers": 5, "index_topk_freq": 3}
CASES = {
    "glm_moe_dsa-shared": ("glm_moe_dsa", SHARED),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE),
    "deepseek_v32": ("deepseek_v32", {**SPARSE, "n_group": 4, "topk_group": 2}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "glm4_moe": ("glm4_moe", SIGMOID_MOE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_hundred_greedy_tokens(name, tmp_path):
    model = write_oracle(*CASES[name], tmp_path)
    ids = prompt(5, 23)
    driver = Driver(make_runner(tmp_path, page_size=16))
    driver.admit(0, ids)
    driver.run([(0, 23)])
    for _ in range(199):
        driver.run([(0, 1)])
    assert driver.sequences[0].known[23:] == greedy(model, ids, 200)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """What index queries and keys are rounded to: e4m3 times a power of two for each row."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = 2.0 ** (largest / 448).log2().ceil()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def narrow(model, kv: str, rank: int, monkeypatch) -> None:
    """Have transformers' model see latents and index keys as a narrow cache holds them."""
    turned = theirs.apply_rotary_pos_emb_interleave
    layout = latent_fp8_packed(rank, 0)

    def rows(x: torch.Tensor) -> torch.Tensor:
        if kv == "bfloat16":
            return x.bfloat16().float()
        return unpack_latent(pack_latent(x, rank), LatentShape(1, rank, 0, 1.0, layout))

    def turn(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        q, k = turned(q, k, cos, sin, position_ids, unsqueeze_dim)
        return (q, k.bfloat16().float()) if unsqueeze_dim == 1 else (q, k)

    def score(self, hidden, low, angles, mask, position_ids, cache=None):
        rope, shape = self.qk_rope_head_dim, (*hidden.shape[:2], self.n_heads, self.head_dim)
        q, k = self.wq_b(low).view(shape), self.k_norm(self.wk(hidden)).unsqueeze(2)
        front = turned(q[..., :rope], k[..., :rope], *angles, unsqueeze_dim=2)
        q, k = (e4m3(torch.cat([a, b[..., rope:]], -1)) for a, b in zip(front, (q, k), strict=True))
        products = torch.einsum("bthd,bsd->bths", q, k.squeeze(2)).relu()
        scores = torch.einsum("bths,bth->bts", products, self.weights_proj(hidden)) + mask
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()

    monkeypatch.setattr(theirs, "apply_rotary_pos_emb_interleave", turn)
    monkeypatch.setattr(theirs.GlmMoeDsaIndexer, "forward", score)
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda one, given, made: rows(made))


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e4m3"])
def test_a_narrow_cache_changes_what_its_rows_are_rounded_to_and_nothing_else(
    kv, tmp_path, monkeypatch
):
    model = write_oracle("glm_moe_dsa", SHARED, tmp_path)
    ids = prompt(8, 90)
    driver = Driver(make_runner(tmp_path, kv_dtype=kv))
    driver.admit(0, ids)
    got = torch.cat([driver.logits([(0, count)])[0] for count in (40, 1, 49)])
    narrow(model, kv, LATENT["kv_lora_rank"], monkeypatch)
    wanted = expected(model, ids)
    # Float32's last bit decides now and then which way a number is rounded.
    assert (got - wanted).abs().max() < 5e-3 * wanted.abs().max()


def logits_in_steps(folder, ids, steps, **changes) -> torch.Tensor:
    driver = Driver(make_runner(folder, **changes))
    driver.admit(0, ids)
    return torch.cat([driver.logits([(0, count)])[0] for count in steps])


def test_scores_in_parts_select_the_same(tmp_path, monkeypatch):
    """Parts end within rows: seven tokens' scores of up to 96 positions are held at a time."""
    folder = write_tiny_glm(tmp_path, "glm52")
    rows = [(0, 41), (1, 1), (2, 13)]

    def run() -> torch.Tensor:
        driver = Driver(make_runner(folder, page_size=4))
        for slot, length in ((0, 80), (1, 36), (2, 13)):
            driver.admit(slot, prompt(slot, length))
        driver.logits([(0, 39), (1, 35)])
        return torch.cat(driver.logits(rows))

    whole = run()
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 96 * 7)
    parts = run()
    assert (whole - parts).abs().max() < 1e-5 * whole.abs().max()


def test_a_short_context_is_dense_whatever_stands_beside_it(tmp_path):
    """Up to top_k tokens are all selected: alone, in a sparse step, and as if there were no index."""
    folder = write_tiny_glm(tmp_path, "glm52")
    ids = prompt(1, TOP_K)
    alone = logits_in_steps(folder, ids, [TOP_K])
    driver = Driver(make_runner(folder))
    driver.admit(0, ids)
    driver.admit(1, prompt(2, 3 * TOP_K))
    beside = torch.cat([driver.logits([(1, 20), (0, 9)])[1], driver.logits([(0, 7), (1, 28)])[0]])
    dense = logits_in_steps(folder, ids, [TOP_K], overrides={"index_topk": 512})
    assert torch.equal(alone, dense)
    assert (alone - beside).abs().max() < 1e-5 * alone.abs().max()


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(
    "name",
    [name if name == "glm52" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_a_token_has_the_same_bits_however_it_is_computed(name, kv, tmp_path):
    """Whole, in chunks, token by token and beside others: what makes flags safe in bfloat16."""
    if why := native.dtype_reasons(probe("cpu"), torch.bfloat16):
        pytest.skip("; ".join(why))
    folder = write_tiny_glm(tmp_path, name)
    ids = prompt(1, 60)
    changes = {"dtype": "bfloat16", "kv_dtype": kv}
    whole = logits_in_steps(folder, ids, [60], **changes)
    assert torch.equal(logits_in_steps(folder, ids, [16, 16, 28], **changes), whole)
    assert torch.equal(logits_in_steps(folder, ids, [1] * 60, page_size=4, **changes), whole)
    driver = Driver(make_runner(folder, **changes))
    for slot in range(6):
        driver.admit(slot, ids if slot == 3 else prompt(slot, 60))
    steps = [[(slot, 10) for slot in range(6)] for _ in range(6)]
    beside = torch.cat([driver.logits(rows)[3] for rows in steps])
    assert torch.equal(beside, whole)


def test_what_scores_take_is_counted(tmp_path):
    """Four bytes a score, and twice that for selecting; models without an index take nothing."""
    model = make_runner(write_tiny_glm(tmp_path / "a", "glm52")).model
    assert model.transient_bytes(512, 1000) == 3 * 4 * 512 * 1000
    most = model.transient_bytes(8192, 200_000)
    assert indexer.SCORE_BYTES < most <= 3 * indexer.SCORE_BYTES
    assert make_runner(write_tiny_glm(tmp_path / "b", "glm4_moe")).model.transient_bytes(9, 9) == 0


def test_a_long_context_is_sparse(tmp_path):
    """What is compared above would prove nothing if selecting changed nothing."""
    folder = write_tiny_glm(tmp_path, "glm5")
    ids = prompt(1, 3 * TOP_K)
    sparse = logits_in_steps(folder, ids, [3 * TOP_K])
    dense = logits_in_steps(folder, ids, [3 * TOP_K], overrides={"index_topk": 512})
    assert (sparse - dense)[:TOP_K].abs().max() < 1e-5 * dense.abs().max()
    assert (sparse - dense)[TOP_K:].abs().max() > 1e-2 * dense.abs().max()


def test_layers_that_share_a_selection_cache_no_index_keys(tmp_path):
    runner = make_runner(write_tiny_glm(tmp_path, "glm52"))
    names = [[layout.name for layout in layer] for layer in runner.model.kv_spec]
    assert names == [["latent", "index_keys"]] * 2 + [["latent"], ["latent", "index_keys"]]
    assert not any("layers.2.self_attn.indexer" in name for name in open_checkpoint(tmp_path).names)


def test_prediction_layers_of_a_checkpoint_are_skipped_with_a_line(tmp_path, caplog):
    """The file has a fifth layer, the configuration says that it is for prediction."""
    write_tiny_glm(tmp_path, "glm5", num_hidden_layers=5)
    skipped = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    with caplog.at_level(logging.INFO):
        runner = make_runner(tmp_path, overrides=skipped)
    assert len(runner.model.kv_spec) == 4
    said = [line.getMessage() for line in caplog.records if "multi-token" in line.getMessage()]
    assert said == ["multi-token prediction is not used: layers from 4 on are skipped"]


def test_the_router_computes_in_float32_whatever_the_model_does(tmp_path):
    folder = write_tiny_glm(tmp_path, "glm5", torch.bfloat16)
    router = make_runner(folder, dtype="bfloat16").model.layers[1].block.router
    assert router.bias.value.dtype == torch.float32
    assert torch.equal(router.bias.value, open_checkpoint(folder).read(router.bias.pieces[0].name))


def test_rows_that_cannot_be_packed_are_refused_at_the_start(tmp_path):
    folder = write_tiny_glm(tmp_path, "glm5", kv_lora_rank=192)
    make_runner(folder)
    with pytest.raises(ConfigError, match="rank of whole blocks of 128, not 192"):
        make_runner(folder, kv_dtype="fp8_e4m3")
