"""`detour bench offline` on a CPU: figures for what was asked, and a batch that is what it says."""

import json

import pytest
import torch
from tiny_glm import write_tiny_glm

from detour.cli import main
from detour.layers.even_routing import TOKENS, EvenRouting
from detour.sampling_params import SamplingParams
from detour.worker.capacity import start_worker
from detour.worker.settings import WorkerSettings
from detour.worker.steady import WARM, SteadyBatch

CPU = ("--device", "cpu", "--threads", "1", "--dtype", "float32", "--page-size", "8")


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory):
    return write_tiny_glm(tmp_path_factory.mktemp("glm") / "glm5", "glm5")


def test_figures_of_a_configuration_alone(glm_folder, tmp_path, capsys):
    words = ("--model", str(glm_folder / "config.json"), "--load-format", "dummy", *CPU)
    asked = ("--batch", "1", "3", "--context", "30", "--steps", "2", "--prompts")
    routed = ("--simulate-routing", "uniform", "--json", str(tmp_path / "figures"))
    assert main(["bench", "offline", *words, *asked, *routed]) == 0
    rows = json.loads((tmp_path / "figures").read_text())
    assert [(row["sequences"], row["tokens"]) for row in rows] == [(1, 1), (3, 3), (3, 90)]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert rows[0]["experts"] == 3  # each token's
    assert 3 < rows[1]["experts"] < rows[2]["experts"] <= 8
    shown = capsys.readouterr().out
    assert "float32" in shown
    assert shown.count("decode") == 2
    assert shown.count("prompts") == 1


def test_a_number_that_is_none_gets_a_sentence(capsys):
    assert main(["bench", "offline", "--batch", "0"]) == 2
    assert "--batch takes positive whole numbers" in capsys.readouterr().err


def test_every_sequence_holds_the_same_context_in_pages_of_its_own(glm_folder):
    settings = WorkerSettings(
        glm_folder, device="cpu", dtype="float32", page_size=8, max_slots=3, threads=1,
        max_total_tokens=3 * 64, max_step_tokens=19, context_length=64, progress=False,
    )  # fmt: skip
    worker = start_worker(settings)
    batch = SteadyBatch(worker, 3, 37, WARM + 3, 16, SamplingParams(temperature=0.0))
    batch.fill()
    table = worker.runner.staging.page_table[:3, :5]
    assert len(table.unique()) == 15
    assert 0 not in table
    for tensor in (one for layer in worker.runner.kv.layers for one in layer):
        own = [tensor[pages.long()].flatten(0, 1)[:37] for pages in table]
        assert own[0].any()
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[0], own[2])
    assert batch.decode(2) > 0
    assert batch.prompts(2)[1] == 16


def test_experts_are_drawn_evenly_and_always_the_same():
    routing = EvenRouting(16, 4, 7, torch.device("cpu"))
    drawn = routing(4096)
    assert all(len(row.unique()) == 4 for row in drawn[:50])
    shares = drawn.flatten().bincount(minlength=16) / drawn.numel()
    assert (shares - 1 / 16).abs().max() < 0.005
    assert torch.equal(drawn, EvenRouting(16, 4, 7, torch.device("cpu"))(4096))
    assert not torch.equal(drawn, EvenRouting(16, 4, 8, torch.device("cpu"))(4096))
    more = routing(TOKENS + 10)
    assert torch.equal(more[TOKENS:], drawn[:10])
