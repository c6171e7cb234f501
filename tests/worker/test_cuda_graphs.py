"""Decode steps replayed at padded sizes give the tokens of steps run as they are.

On a CPU a recording that calls again stands for a graph; on a GPU the graphs are real.
"""

import logging

import numpy as np
import pytest
import torch
from step_driver import Driver, make_runner
from tiny import write_tiny
from tiny_glm import write_tiny_glm

from detour.config.parse import parse
from detour.errors import ConfigError
from detour.launch_engine import worker_settings
from detour.sampling_params import SamplingParams
from detour.worker.cuda_graphs import capture_all, decode_sizes, padded

IDS = [(7 * place) % 300 for place in range(60)]
SIZES = (1, 2, 4, 8)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def call_again(call):
    """Stands for a recorded graph: the same work on the same tensors, into the same tensors."""
    batch, places, hidden = call()

    def replay() -> None:
        newer, _, states = call()
        hidden.copy_(states)
        for name in ("tokens", "positions", "write_slots", "page_table"):
            vars(batch)[name].copy_(vars(newer)[name])

    return (batch, places, hidden), replay


def make(folder, device: str, *, graphs: bool, **changes) -> Driver:
    asked = {"graph_sizes": SIZES} if graphs and device == "cuda" else {}
    runner = make_runner(folder, device=device, page_size=8, **asked, **changes)
    if graphs and device == "cpu":
        # The CPU's kernels read lengths on the host; Triton's, which can be recorded, do not.
        runner.model.layers[0].attention.attend.current = LengthFree
        runner.graphs.capture(SIZES, call_again)
    assert {size for size, _ in runner.graphs.captured} == (set(SIZES) if graphs else set())
    return Driver(runner)


class LengthFree:
    """Attention that learns how far a token sees from device tensors alone, as graphs need it."""

    replays = True

    @staticmethod
    def plan(batch, shape):
        return batch, shape

    @staticmethod
    def run(plan, q, keys, values):
        batch, shape = plan
        place = torch.arange(batch.page_table.shape[1] * batch.page_size, device=q.device)
        pages = batch.page_table.long()[:, place // batch.page_size][batch.row_of_token]
        slots = pages * batch.page_size + place % batch.page_size
        k, v = (c.flatten(0, 1)[slots].float() for c in (keys, values))
        grouped = q.float().unflatten(1, (shape.kv_heads, -1))
        scores = torch.einsum("tkgd,tskd->tkgs", grouped, k) * shape.scale
        later = place > batch.positions[:, None]
        weights = scores.masked_fill(later[:, None, None], -torch.inf).softmax(dim=-1)
        return torch.einsum("tkgs,tskd->tkgd", weights, v).flatten(1, 2).to(q.dtype)


def told(driver: Driver) -> dict[int, list[int]]:
    """Sequences that come, go, grow past pages and share steps with chunks; their tokens."""
    for slot in range(6):
        drawn = SamplingParams(temperature=0.9, top_k=20, seed=slot, logprobs=2)
        driver.admit(
            slot, IDS[: 5 + 9 * slot], drawn if slot % 2 else SamplingParams(temperature=0)
        )
    driver.run([(slot, 5 + 9 * slot) for slot in range(6)])
    for step in range(30):
        rows = [(slot, 1) for slot in (4, 2, 5, 0, 1, 3) if step < 6 + 5 * slot]
        driver.run(rows)
        if step == 11:
            driver.admit(6, IDS)
            driver.run([(6, 33), (5, 1)])
            driver.run([(6, 27), (5, 1)])
        if step > 11:
            driver.run([(6, 1)])
    return {slot: sequence.known for slot, sequence in driver.sequences.items()}


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    path = tmp_path_factory.mktemp("models") / "qwen3_moe"
    mixture = write_tiny(path, model_type="qwen3_moe", norm_topk_prob=True, **experts)
    return {"llama": tiny_folder, "qwen3_moe": mixture}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_same_tokens_with_graphs_and_without(folders, name, device):
    with_graphs, without = (make(folders[name], device, graphs=on) for on in (True, False))
    assert told(with_graphs) == told(without)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_replay_writes_to_its_own_rows_and_to_page_0(tiny_folder, device):
    driver = make(tiny_folder, device, graphs=True)
    for slot in range(7):
        driver.admit(slot, IDS[: 9 + slot])
    driver.run([(slot, 9 + slot) for slot in range(7)])
    driver.run([(slot, 1) for slot in range(7)])
    layers = [tensor for layer in driver.runner.kv.layers for tensor in layer]
    before = [tensor.clone() for tensor in layers]
    driver.run([(2, 1)])
    driver.run([(3, 1), (2, 1), (5, 1)])
    written = {0, *(driver.sequences[slot].pages[-1] for slot in (2, 3, 5))}
    others = [page for page in range(driver.runner.kv.num_pages) if page not in written]
    assert all(torch.equal(x[others], y[others]) for x, y in zip(layers, before, strict=True))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_tokens_that_the_host_does_not_know_yet(tiny_folder, device):
    known = make(tiny_folder, device, graphs=True)
    known.admit(1, IDS)
    known.run([(1, 60)])
    for _ in range(5):
        known.run([(1, 1)])
    blind = make(tiny_folder, device, graphs=True)
    blind.admit(1, IDS)
    results = [blind.runner.run(blind.plan([(1, 60)]))]
    results += [blind.runner.run(blind.plan([(1, 1)], unknown=True)) for _ in range(5)]
    assert [int(one.wait().tokens[0]) for one in results] == known.sequences[1].known[60:]


# Kernels of the CPU read lengths on the host; the references of these do not.
FREE = ("dense_mla", "sparse_mla", "index_scores", "index_topk")


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory):
    return write_tiny_glm(tmp_path_factory.mktemp("glm") / "glm5", "glm5")


def test_a_model_that_selects_has_graphs_for_short_contexts_too(glm_folder):
    told = []
    for graphs in (True, False):
        backends = dict.fromkeys(FREE, "reference")
        driver = Driver(make_runner(glm_folder, page_size=8, context_length=64, backends=backends))
        if graphs:
            driver.runner.graphs.capture((1, 3), call_again)
            assert set(driver.runner.graphs.captured) == {(1, 16), (1, 64), (3, 16), (3, 64)}
        driver.admit(0, IDS[:3])
        driver.admit(1, IDS[:12])
        driver.run([(0, 3), (1, 12)])
        for step in range(14):  # the second grows beyond what is attended to whole
            driver.run([(0, 1), (1, 1)] if step < 10 else [(0, 1)])
        told.append({slot: sequence.known for slot, sequence in driver.sequences.items()})
    assert told[0] == told[1]


def test_steps_that_no_graph_holds_run_as_they_are(tiny_folder):
    driver = make(tiny_folder, "cpu", graphs=True, max_slots=12)
    for slot in range(10):
        driver.admit(slot, IDS[:20])
    chunk, more = driver.plan([(0, 20)]), driver.plan([(slot, 20) for slot in range(1, 10)])
    half = driver.plan([(0, 1), (1, 1)])
    for plan in (
        chunk,
        more,
        padded(more, 9, 0),
        half.__class__(**{**vars(half), "samples": half.samples & False}),
    ):
        assert driver.runner.graphs.run(plan) is None


@pytest.mark.parametrize("rows", [1, 7, 64, 250, 1024])
def test_sizes_reach_the_most_and_waste_little(rows):
    sizes = decode_sizes(rows)
    assert sizes[-1] == rows
    assert len(sizes) < 60
    assert sorted(set(sizes)) == list(sizes)
    for wanted in range(9, rows + 1):
        size = min(size for size in sizes if size >= wanted)
        assert size - wanted <= max(7, wanted / 8)


def test_sizes_that_are_asked_for():
    assert decode_sizes(16, "8,1,4 4,64") == (1, 4, 8, 16)
    assert decode_sizes(0) == ()
    with pytest.raises(ConfigError, match="--cuda-graph-bs"):
        decode_sizes(16, "8,many")


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--max-running-requests 20", (1, 2, 4, 8, 16, 20)),
        ("--max-running-requests 20 --cuda-graph-max-bs 8", (1, 2, 4, 8)),
        ("--max-running-requests 20 --cuda-graph-bs 3 5 99", (3, 5, 20)),
        ("--cuda-graph-sizes=2,6 --max-num-seqs 7", (2, 6)),
        ("--max-running-requests 20 --enforce-eager", ()),
        ("--disable-cuda-graph --cuda-graph-bs 3", ()),
        ("--max-running-requests 20 --cuda-graph-backend-decode=disabled", ()),
        ("--max-running-requests 2 --cuda-graph-backend-decode tc_piecewise", (1, 2)),
    ],
)
def test_flags_choose_the_sizes(words, sizes, tmp_path):
    config = parse(["--model", "m", "--device", "cpu", *words.split()]).config
    assert worker_settings(config, tmp_path, seed=0).graph_sizes == sizes


def test_padding_adds_rows_of_the_spare_slot_alone(tiny_folder):
    driver = make(tiny_folder, "cpu", graphs=False)
    driver.admit(3, IDS)
    driver.run([(3, 60)])
    plan = driver.plan([(3, 1)])
    wide = padded(plan, 4, 8)
    assert wide.slots.tolist() == [3, 8, 8, 8]
    assert wide.starts.tolist() == [60, 0, 0, 0]
    assert wide.token_count == 4
    assert wide.samples.all()
    assert all(array.dtype == np.int32 for array in (wide.slots, wide.starts, wide.tokens))


@pytest.mark.gpu
def test_a_model_that_cannot_be_recorded_is_served_without(tiny_folder, caplog):
    driver = make(tiny_folder, "cuda", graphs=False)
    model = driver.runner.model
    forward = model.forward

    def waits(*arguments):
        torch.cuda.synchronize()
        return forward(*arguments)

    model.forward = waits
    with caplog.at_level(logging.WARNING):
        capture_all(driver.runner.graphs, SIZES, torch.device("cuda"))
    assert "without CUDA graphs" in caplog.text
    driver.admit(0, IDS)
    assert driver.run([(0, 60)]).finite.all()
