"""Slots and plans to tokens: parameters, penalties, biases, log-probabilities, exactness."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from detour.engine.plan import Admitted, StepPlan
from detour.sampling_params import SamplingParams
from detour.worker.sampler import Sampler, token_logprobs

VOCAB = 300
CPU = torch.device("cpu")


def plan_of(slots, starts, counts=None, tokens=None, samples=None, admitted=()):
    counts = [1] * len(slots) if counts is None else counts
    empty = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        slots=np.array(slots, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        tokens=np.zeros(sum(counts), dtype=np.int32) if tokens is None else np.array(tokens),
        samples=np.ones(len(slots), dtype=bool) if samples is None else np.array(samples),
        prompt_logprobs=np.full(len(slots), -1, dtype=np.int32),
        table_slots=empty,
        table_columns=empty,
        table_pages=empty,
        admitted=tuple(admitted),
    )


def admitted(slot, known=(1, 2, 3), prompt=None, **asked):
    ids = np.array(known, dtype=np.int32)
    length = len(ids) if prompt is None else prompt
    return Admitted(slot, SamplingParams(**asked), length, ids)


def new_sampler(*sequences, max_slots=128, eos_ids=(0,)):
    sampler = Sampler(max_slots, VOCAB, CPU, eos_ids)
    sampler.admit(sequences)
    return sampler


def run(sampler, logits, plan, inputs=None):
    inputs = torch.zeros(plan.token_count, dtype=torch.int64) if inputs is None else inputs
    return sampler.sample(logits.clone(), sampler.prepare(plan), torch.as_tensor(inputs))


def some_logits(rows, seed=1, scale=3.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_is_argmax_with_the_lowest_of_equals():
    logits = some_logits(4)
    logits[2, [250, 40, 90]] = 99.0
    sampler = new_sampler(*(admitted(slot, temperature=0.0) for slot in range(4)))
    out = run(sampler, logits, plan_of([0, 1, 2, 3], [5] * 4))
    assert out.tokens.tolist()[2] == 40
    assert torch.equal(out.tokens, logits.argmax(1))
    assert out.finite.all()
    assert out.top_ids.shape == (4, 0)


def test_only_sampled_rows_get_tokens_in_the_plans_order():
    sampler = new_sampler(*(admitted(slot, temperature=0.0) for slot in range(3)))
    logits = some_logits(2)
    plan = plan_of([2, 0, 1], [0, 3, 4], counts=[3, 1, 1], samples=[False, True, True])
    assert torch.equal(run(sampler, logits, plan).tokens, logits.argmax(1))


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "top_p": 0.95},
    {"temperature": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {7: 5.0, 9: -100.0}, "min_tokens": 4, "max_tokens": 9},
]


def mixed_request(number):
    known = np.random.default_rng(number).integers(0, VOCAB, 5 + number % 7)
    return {"known": known, "seed": 1000 + number, **MIXED[number % len(MIXED)]}


def test_a_request_alone_gets_what_it_gets_among_a_hundred():
    requests = [mixed_request(number) for number in range(101)]
    logits = [some_logits(101, seed=step, scale=2.0) for step in range(6)]
    together = new_sampler(*(admitted(slot, **asked) for slot, asked in enumerate(requests)))
    starts = np.array([len(asked["known"]) - 1 for asked in requests])
    last = torch.tensor([int(asked["known"][-1]) for asked in requests])
    streams = []
    for step in range(6):
        last = run(together, logits[step], plan_of(range(101), starts + step), last).tokens
        streams.append(last.tolist())
    for number in range(0, 101, 4):
        alone = new_sampler(admitted(55, **requests[number]))
        token = torch.tensor([int(requests[number]["known"][-1])])
        for step in range(6):
            plan = plan_of([55], [int(starts[number]) + step])
            token = run(alone, logits[step][number : number + 1], plan, token).tokens
            assert int(token) == streams[step][number]


def test_a_sequence_continued_elsewhere_goes_on_as_it_would_have():
    asked = mixed_request(6) | {"frequency_penalty": 0.7}
    logits = [some_logits(1, seed=step) for step in range(8)]
    first, known = new_sampler(admitted(3, **asked)), list(asked["known"])
    prompt = len(known)
    for step in range(8):
        plan = plan_of([3], [len(known) - 1])
        known.append(int(run(first, logits[step], plan, [known[-1]]).tokens))
    middle = known[: prompt + 4]
    rest = {key: value for key, value in asked.items() if key != "known"}
    second = new_sampler(admitted(9, known=middle, prompt=prompt, **rest))
    for step in range(4, 8):
        plan = plan_of([9], [len(middle) - 1])
        middle.append(int(run(second, logits[step], plan, [middle[-1]]).tokens))
    assert middle == known


def test_running_steps_again_changes_nothing():
    """Also from an earlier step, and where the second run's token differs from the first's."""
    asked = {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    sampler = new_sampler(admitted(0, **asked))
    inputs = [3, 10, 11, 12, 13]

    def step(number, token):
        return run(
            sampler, some_logits(1, seed=number, scale=0.5), plan_of([0], [2 + number]), [token]
        )

    for number in (0, 1, 1, 2, 3, 2, 3, 4):
        step(number, inputs[number])
    generated = sampler.penalties.generated[sampler.penalties.row_of[0]]
    assert generated.nonzero().flatten().tolist() == [10, 11, 12, 13]
    assert generated.sum() == 4
    step(3, 99)
    assert generated.nonzero().flatten().tolist() == [10, 11, 99]
    again = step(3, 99).tokens
    assert torch.equal(again, step(3, 99).tokens)


def penalised(logits, prompt, generated, asked):
    """The penalties of one row in plain python."""
    out = logits.double().clone()
    for token in {*prompt, *generated}:
        value, factor = out[token], asked.get("repetition_penalty", 1.0)
        out[token] = value / factor if value > 0 else value * factor
    for token in generated:
        out[token] -= asked.get("frequency_penalty", 0.0)
    for token in set(generated):
        out[token] -= asked.get("presence_penalty", 0.0)
    return out


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.8},
    ],
    ids=str,
)
def test_penalties_equal_the_plain_rule(asked):
    """The log-probabilities of a bias-free copy would hide them, so read the penalised logits."""
    prompt, generated = [4, 5, 6, 5], [6, 9, 9, 12, 9]
    sampler = new_sampler(admitted(1, known=[*prompt, *generated[:2]], prompt=4, **asked))
    logits = some_logits(1)
    for position, token in enumerate(generated[1:], start=5):
        work = logits.clone()
        step = sampler.prepare(plan_of([1], [position]))
        sampler.sample(work, step, torch.tensor([token]))
    expected = penalised(logits[0], prompt, generated, asked)
    assert torch.allclose(work[0].double(), expected, atol=1e-5)
    if set(asked) == {"repetition_penalty"}:
        ids = torch.tensor([[*prompt, *generated]])
        theirs = RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"])(ids, logits.clone())
        assert torch.equal(work, theirs)


def test_penalty_rows_are_given_back_and_grow_with_demand():
    sampler = new_sampler()
    for _ in range(3):
        sampler.admit([admitted(slot, presence_penalty=1.0) for slot in range(10)])
        assert len(sampler.penalties.generated) == 16
        sampler.admit([admitted(slot) for slot in range(10)])
        assert len(sampler.penalties.free) == 16
    sampler.admit([admitted(2, known=[7], prompt=0, presence_penalty=1.0)])
    assert sampler.penalties.generated.sum() == 1
    assert sampler.penalties.prompted[sampler.penalties.row_of[2]].sum() == 0


def test_logit_bias_and_its_replacement():
    sampler = new_sampler(
        admitted(0, temperature=0.0, logit_bias={17: 100.0}), admitted(1, temperature=0.0)
    )
    logits = some_logits(2)
    assert run(sampler, logits, plan_of([0, 1], [3, 3])).tokens.tolist() == [
        17,
        int(logits[1].argmax()),
    ]
    sampler.admit(
        [
            admitted(0, temperature=0.0),
            admitted(1, temperature=0.0, logit_bias={int(logits[1].argmax()): -100.0}),
        ]
    )
    tokens = run(sampler, logits, plan_of([0, 1], [3, 3])).tokens.tolist()
    assert tokens == [int(logits[0].argmax()), int(logits[1].topk(2).indices[1])]


def test_biases_survive_the_moving_of_their_store():
    sampler = new_sampler()
    for turn in range(40):
        slots = [turn % 5, 5 + turn % 3]
        sampler.admit(
            [
                admitted(
                    slot,
                    temperature=0.0,
                    logit_bias=dict.fromkeys(range(turn, turn + 150), -100.0) | {slot + 200: 50.0},
                )
                for slot in slots
            ]
        )
    assert len(sampler.bias.ids) <= 8192
    assert run(sampler, some_logits(8), plan_of(range(8), [3] * 8)).tokens.tolist() == list(
        range(200, 208)
    )


def test_min_tokens_bars_every_end_until_reached():
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 5, 8]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = new_sampler(admitted(0, temperature=0.0, min_tokens=2, stop_token_ids=(5,)))
    found = [int(run(sampler, logits, plan_of([0], [start])).tokens) for start in (2, 3, 4, 5)]
    assert found == [8, 8, 0, 0]


def test_logprobs_are_those_of_the_models_logits():
    logits = some_logits(3)
    sampler = new_sampler(
        admitted(0, logprobs=4, temperature=1.9, top_k=5, repetition_penalty=1.5, known=[1, 2]),
        admitted(1),
        admitted(2, logprobs=0, temperature=0.0, logit_bias={33: 100.0}),
    )
    out = run(sampler, logits, plan_of([0, 1, 2], [1, 2, 2]))
    true = torch.log_softmax(logits.double(), 1)
    assert out.tokens[2] == 33
    for row in (0, 2):
        assert float(out.logprobs[row]) == pytest.approx(
            float(true[row, out.tokens[row]]), abs=1e-5
        )
    assert out.logprobs[1] == 0
    assert out.top_ids.shape == (3, 4)
    assert torch.equal(out.top_ids[0], true[0].topk(4).indices)
    assert torch.allclose(out.top_logprobs[0].double(), true[0].topk(4).values, atol=1e-5)


def test_prompt_logprobs_of_a_chunk():
    logits, targets = some_logits(7), torch.arange(7) * 3
    logprobs, ids, best = token_logprobs(logits, targets, 2)
    true = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(logprobs.double(), true.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.equal(ids, true.topk(2, dim=1).indices)
    assert best.shape == (7, 2)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("asked", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}], ids=str)
def test_a_row_that_is_not_finite_is_flagged_alone(broken, asked):
    logits = some_logits(3)
    logits[1, 77] = broken
    sampler = new_sampler(*(admitted(slot, **asked) for slot in range(3)))
    out = run(sampler, logits, plan_of([0, 1, 2], [3] * 3))
    assert out.finite.tolist() == [True, False, True]
    assert 0 <= int(out.tokens[1]) < VOCAB


def test_bfloat16_logits_are_sampled_in_float32():
    logits = some_logits(2).bfloat16()
    sampler = new_sampler(admitted(0, temperature=0.0, logprobs=1), admitted(1))
    out = run(sampler, logits, plan_of([0, 1], [3, 3]))
    assert out.logprobs.dtype == torch.float32
    assert out.tokens[0] == logits[0].argmax()
