"""/v1/completions: prompt forms, choices, echo and log-probabilities."""

import pytest
from fake_engine import BOS, EOS, logprob_of, says

from detour.engine.request import unpack_ids


def complete(server, prompt="ab", **fields):
    return server.openai.completions.create(model="small", prompt=prompt, **fields)


def prompts_of(server):
    return [unpack_ids(request.prompt_ids).tolist() for request in server.engine.requests]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompt_forms(server, prompt, ids):
    reply = complete(server, prompt)
    assert prompts_of(server) == ids
    assert [choice.index for choice in reply.choices] == list(range(len(ids)))
    assert all(choice.text == "Hello!" for choice in reply.choices)
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert reply.usage.completion_tokens == 7 * len(ids)


def test_default_is_sixteen_tokens(server):
    server.engine.script = says("x" * 100)
    choice = complete(server).choices[0]
    assert (choice.text, choice.finish_reason) == ("x" * 16, "length")


def by_place(request, generated):
    """The prompt's last byte, then the sequence's place in its group."""
    last = unpack_ids(request.prompt_ids)[-1]
    return [int(last), ord("0") + request.sid - request.group, EOS][generated]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_choices(server, stream):
    server.engine.script = by_place
    wanted = ["a0", "a1", "b0", "b1"]
    if stream:
        texts = [""] * 4
        for chunk in complete(server, ["a", "b"], n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        reply = complete(server, ["a", "b"], n=2)
        texts = [choice.text for choice in reply.choices]
        assert reply.usage.prompt_tokens == 4  # each prompt once
    assert texts == wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo(server, prompt, stream):
    if stream:
        chunks = list(complete(server, prompt, echo=True, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        text = complete(server, prompt, echo=True).choices[0].text
    assert text == "abHello!"


def test_logprobs(server):
    logprobs = complete(server, logprobs=2).choices[0].logprobs
    ids = [*b"Hello!", EOS]
    assert logprobs.tokens == [*"Hello!", "<eos>"]
    assert logprobs.token_logprobs == [logprob_of(token) for token in ids]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6]
    assert logprobs.top_logprobs[0] == {"H": logprob_of(72), "\x00": 0.0}


def test_streamed_logprobs_add_up(server):
    chunks = list(complete(server, logprobs=1, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == [*"Hello!", "<eos>"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(server, max_tokens):
    """What lm-eval asks: the prompt's log-probabilities, the first token's being null."""
    reply = complete(server, "abc", echo=True, logprobs=1, max_tokens=max_tokens)
    choice = reply.choices[0]
    logprobs = choice.logprobs
    tokens = ["<bos>", "a", "b", "c", *"H"[:max_tokens]]
    assert logprobs.tokens == tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:4] == [logprob_of(token) for token in b"abc"]
    assert logprobs.top_logprobs[1] == {"a": logprob_of(97)}
    assert choice.text == "abc" + "H"[:max_tokens]
    assert (choice.finish_reason, reply.usage.completion_tokens) == ("length", max_tokens)


def test_usage_in_a_stream(server):
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 3 + 7


def test_token_ids_go_up_to_the_models_vocabulary(server):
    """A model's vocabulary is padded beyond its tokenizer's; ids of the padding say nothing."""
    server.engine.script = lambda request, generated: (104, 300, 105)[generated]
    body = {"prompt": [104, 319], "max_tokens": 3}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hi"
    refused = server.http.post("/v1/completions", json={"prompt": [104, 320]})
    assert refused.status_code == 400
    assert "between 0 and 319, got 320" in refused.json()["error"]["message"]
