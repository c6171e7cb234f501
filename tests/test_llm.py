"""The engine in this process: the same answers as a server gives, without one."""

import pytest

from detour.errors import BadRequest, ConfigError
from detour.llm import LLM, config_of
from detour.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = ["one", "a longer prompt than that", "two", "x" * 60]


@pytest.fixture(scope="module")
def llm(tiny_llama):
    options = {"dtype": "float32", "threads": 1, "max_total_tokens": 512, "max_running_requests": 4}
    with LLM(str(tiny_llama), context_length=128, **options) as made:
        yield made


def test_outputs_stand_in_the_order_of_their_prompts_and_equal_those_alone(llm):
    together = llm.generate(PROMPTS * 3, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone] * 3
    assert all(o.finish_reason == "length" and len(o.token_ids) == 8 for o in together)


def test_token_ids_are_a_prompt_too(llm):
    ids = llm._model.tokenizer.encode("one")
    assert llm.generate(ids, GREEDY)[0].text == llm.generate("one", GREEDY)[0].text
    assert llm.generate([ids, ids], GREEDY)[1].prompt_tokens == len(ids)
    assert llm.generate([], GREEDY) == []


def test_a_stream_adds_up_to_the_chat(llm):
    messages = [{"role": "user", "content": "hello"}]
    pieces = list(llm.stream_chat(messages, GREEDY))
    assert "".join(pieces) == llm.chat(messages, GREEDY).text


def test_a_stream_that_is_left_leaves_nothing_behind(llm):
    stream = llm.stream_chat([{"role": "user", "content": "hello"}], GREEDY)
    next(stream)
    stream.close()
    llm.generate("one", GREEDY)  # takes in the step that was out
    assert llm._open == {}
    assert llm._scheduler.open_sequences == 0


def test_a_stop_string_ends_a_text(llm):
    whole = llm.generate("one", GREEDY)[0].text
    stop = whole[2:4]
    output = llm.generate("one", SamplingParams(max_tokens=8, temperature=0.0, stop=(stop,)))[0]
    assert (output.finish_reason, output.stop) == ("stop", stop)
    assert output.text == whole[: whole.index(stop)]


def test_seeds(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=5, ignore_eos=True, logprobs=0)
    first, second = llm.generate(["one", "one"], params)
    assert first.token_ids == second.token_ids
    assert len(first.logprobs) == 8
    drawn = llm.generate(
        ["one"] * 2, SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
    )
    assert drawn[0].token_ids != drawn[1].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([[]], GREEDY, "has no tokens"),
        ([[999]], GREEDY, "below the vocabulary size"),
        ("x" * 500, GREEDY, "the context holds 128"),
        ("one", SamplingParams(top_p=2.0), "top_p must be between"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(llm, prompt, params, words):
    with pytest.raises(BadRequest, match=words):
        llm.generate(prompt, params)
    assert llm._open == {}


def test_an_option_that_is_not_there():
    with pytest.raises(ConfigError, match=r"no option max_runing_requests\. Did you mean max_run"):
        config_of("", {"max_runing_requests": 3})
