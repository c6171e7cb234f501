"""One rank's step around the model: log-probabilities, idempotence, noise, rows gone wrong."""

import numpy as np
import pytest
import torch
from step_driver import Driver, make_runner

from detour.sampling_params import SamplingParams

IDS = [(7 * place) % 300 for place in range(60)]


@pytest.fixture
def driver(tiny_folder):
    return Driver(make_runner(tiny_folder, page_size=8))


def test_prompt_logprobs_of_chunks_are_those_of_the_whole(tiny_folder):
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    driver = Driver(make_runner(tiny_folder))
    driver.runner.logit_bytes = 7 * 4 * 320  # seven rows at a time
    driver.admit(0, IDS)
    whole = driver.logits([(0, 60)])[0].log_softmax(-1)
    driver.admit(1, IDS, params)
    rows = [driver.run([(1, count)]).prompt_logprobs[0] for count in (25, 1, 34)]
    assert [(row.slot, row.start, len(row.logprobs)) for row in rows] == [
        (1, 1, 25),
        (1, 26, 1),
        (1, 27, 33),
    ]
    told = torch.from_numpy(np.concatenate([row.logprobs for row in rows]))
    wanted = whole[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(told, wanted, atol=1e-5)
    top = torch.from_numpy(np.concatenate([row.top_ids for row in rows])).long()
    assert torch.equal(top, whole[:-1].topk(3).indices)


def test_logprobs_are_those_of_the_models_logits(driver):
    driver.admit(0, IDS)
    wanted = driver.logits([(0, 60)])[0][-1].log_softmax(-1)
    driver.admit(1, IDS, SamplingParams(temperature=0.7, seed=5, logprobs=4))
    result = driver.run([(1, 60)])
    assert result.logprobs[0] == pytest.approx(float(wanted[result.tokens[0]]), abs=1e-5)
    assert result.top_ids[0].tolist() == wanted.topk(4).indices.tolist()
    assert result.top_logprobs[0].tolist() == pytest.approx(
        wanted.topk(4).values.tolist(), abs=1e-5
    )


def test_a_step_run_twice_gives_the_same(driver):
    params = SamplingParams(temperature=1.0, seed=9, repetition_penalty=1.3, frequency_penalty=0.5)
    driver.admit(0, IDS, params)
    driver.run([(0, 60)])
    for _ in range(3):
        plan = driver.plan([(0, 1)])
        first = driver.runner.run(plan).wait()
        kept = [tensor.clone() for layer in driver.runner.kv.layers for tensor in layer]
        second = driver.runner.run(plan).wait()
        assert first.tokens.tolist() == second.tokens.tolist()
        now = [tensor for layer in driver.runner.kv.layers for tensor in layer]
        assert all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))
        driver.commit(second)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(tiny_folder):
    def tokens(others: int) -> list[int]:
        driver = Driver(make_runner(tiny_folder, page_size=4))
        driver.admit(3, IDS[:20], SamplingParams(temperature=1.0, seed=42))
        slots = [slot for slot in range(others) if slot != 3]
        for slot in slots:
            driver.admit(slot, IDS[slot : 30 + slot], SamplingParams(temperature=1.0, seed=slot))
        driver.run([(slot, 30) for slot in slots] + [(3, 20)])
        for _ in range(8):
            driver.run([(3, 1), *((slot, 1) for slot in slots)])
        return driver.sequences[3].known[20:]

    assert tokens(others=0) == tokens(others=7)


def test_only_the_row_whose_logits_are_not_finite_says_so(driver):
    driver.admit(0, IDS)
    driver.admit(1, IDS[:30])
    driver.run([(0, 60), (1, 30)])
    page = driver.sequences[0].pages[2]
    driver.runner.kv.layers[1][1][page, 3] = torch.nan
    result = driver.run([(1, 1), (0, 1)])
    assert result.slots.tolist() == [1, 0]
    assert result.finite.tolist() == [True, False]


def test_a_step_that_samples_nothing(driver):
    driver.admit(0, IDS)
    result = driver.run([(0, 10)])
    assert len(result.tokens) == len(result.slots) == 0


def test_a_new_sequence_in_a_slot_sees_nothing_of_the_last(driver):
    driver.admit(0, IDS)
    driver.run([(0, 60)])
    driver.admit(0, IDS[5:20])
    first = driver.run([(0, 15)])
    driver.admit(4, IDS[5:20])
    assert driver.run([(4, 15)]).tokens.tolist() == first.tokens.tolist()
