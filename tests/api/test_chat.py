"""Chat completions through the real openai client against the scripted engine."""

import json

import pytest
from fake_engine import EOS, logprob_of, says

from detour.engine.request import unpack_ids

HELLO = [{"role": "user", "content": "Hi"}]


def ask(server, **fields):
    return server.openai.chat.completions.create(model="small", messages=HELLO, **fields)


def chunks(server, **fields):
    return list(ask(server, stream=True, **fields))


def text_of(stream, index=0):
    return "".join(
        choice.delta.content or ""
        for chunk in stream
        for choice in chunk.choices
        if choice.index == index
    )


def test_whole_reply(server):
    reply = ask(server)
    assert reply.object == "chat.completion" and reply.model == "small"
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert (choice.finish_reason, choice.matched_stop) == ("stop", EOS)
    assert reply.usage.completion_tokens == 7
    assert reply.usage.prompt_tokens == len("<user>Hi\n<assistant>")
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_prompt_is_the_rendered_template(server):
    ask(server)
    assert bytes(unpack_ids(server.engine.requests[0].prompt_ids).tolist()) == (
        b"<user>Hi\n<assistant>"
    )


def test_streamed_reply(server):
    stream = chunks(server)
    assert stream[0].choices[0].delta.role == "assistant"
    assert text_of(stream) == "Hello!"
    assert [c.choices[0].finish_reason for c in stream][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in stream[:-1])
    assert len({c.id for c in stream}) == 1 and all(c.usage is None for c in stream)


def test_stream_usage_comes_last_and_alone(server):
    server.engine.cached_tokens = 5
    stream = chunks(server, stream_options={"include_usage": True})
    assert stream[-1].choices == [] and stream[-1].usage.completion_tokens == 7
    assert stream[-1].usage.prompt_tokens_details.cached_tokens == 5
    assert all(c.usage is None for c in stream[:-1])


def test_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c.usage.completion_tokens for c in chunks(server, stream_options=options)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 7


def test_stream_ends_with_done(server):
    body = {"model": "small", "messages": HELLO, "stream": True}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_characters_of_several_tokens_never_arrive_in_parts(server):
    server.engine.script = says("naïve 😀 日本語 👩‍👩‍👧")
    stream = chunks(server)
    assert text_of(stream) == "naïve 😀 日本語 👩‍👩‍👧"
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in stream)
    assert ask(server).choices[0].message.content == "naïve 😀 日本語 👩‍👩‍👧"


def test_text_is_escaped_as_json(server):
    text = 'quote " backslash \\ newline \n tab \t bell \x07 sep \u2028'
    server.engine.script = says(text)
    assert text_of(chunks(server)) == text


def test_max_tokens(server):
    choice = ask(server, max_tokens=3).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hel", "length")
    choice = ask(server, max_tokens=5, max_completion_tokens=2).choices[0]
    assert choice.message.content == "He"


def test_max_tokens_default_is_the_rest_of_the_context(server):
    ask(server)
    request = server.engine.requests[0]
    assert request.params.max_tokens == 2048 - len(request.prompt_ids) // 4


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_ends_and_aborts(server, keep, stream):
    server.engine.script = says("one two three")
    fields = {"stop": ["two"], "extra_body": {"include_stop_str_in_output": keep}}
    wanted = "one two" if keep else "one "
    if stream:
        got = chunks(server, **fields)
        assert text_of(got) == wanted
        end = got[-1].choices[0]
    else:
        end = ask(server, **fields).choices[0]
        assert end.message.content == wanted
    assert (end.finish_reason, end.matched_stop) == ("stop", "two")
    assert server.engine.aborted == [server.engine.requests[0].sid]


def test_stop_prefix_that_comes_to_nothing_is_shown(server):
    server.engine.script = says("one tw")
    assert ask(server, stop="two").choices[0].message.content == "one tw"


def test_stop_token_is_counted_but_not_shown(server):
    fields = {"extra_body": {"stop_token_ids": [ord("!")]}}
    reply = ask(server, **fields)
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].matched_stop == ord("!") and reply.usage.completion_tokens == 6
    fields["extra_body"]["no_stop_trim"] = True
    assert ask(server, **fields).choices[0].message.content == "Hello!"


def test_ignore_eos_and_special_tokens(server):
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    reply = ask(server, max_tokens=8, extra_body=fields)
    assert reply.choices[0].message.content == "Hello!<eos><eos>"
    fields["skip_special_tokens"] = True
    assert ask(server, max_tokens=8, extra_body=fields).choices[0].message.content == "Hello!"


def by_choice(request, generated):
    """Another letter for each sequence of a group, and another length."""
    place = request.sid - request.group
    return ord("a") + place if generated <= place else EOS


def test_choices_come_in_order(server):
    server.engine.script = by_choice
    reply = ask(server, n=4, seed=7)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [c.message.content for c in reply.choices] == ["a", "bb", "ccc", "dddd"]
    assert reply.usage.completion_tokens == 2 + 3 + 4 + 5
    requests = server.engine.requests
    assert {r.group for r in requests} == {requests[0].sid}
    assert len({r.params.seed for r in requests}) == 4 and requests[0].params.seed == 7


def test_streamed_choices_carry_their_index(server):
    server.engine.script = by_choice
    stream = chunks(server, n=3)
    assert [text_of(stream, index) for index in range(3)] == ["a", "bb", "ccc"]
    ends = [c.choices[0].index for c in stream if c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, stream):
    server.engine.script = says("hé")
    if stream:
        got = [
            c.choices[0].logprobs
            for c in chunks(server, logprobs=True, top_logprobs=2)
            if c.choices[0].logprobs
        ]
        content = [entry for one in got for entry in one.content]
    else:
        content = ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[104], [0xC3], [0xA9], list(b"<eos>")]
    assert [entry.token for entry in content] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert [entry.logprob for entry in content] == [
        logprob_of(token) for token in [104, 0xC3, 0xA9, EOS]
    ]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2, 2]
    assert content[0].top_logprobs[0].token == "h"


def test_logprobs_without_top(server):
    content = ask(server, logprobs=True).choices[0].logprobs.content
    assert len(content) == 7 and all(entry.top_logprobs == [] for entry in content)


def test_token_ids(server):
    reply = ask(server, extra_body={"return_token_ids": True})
    assert reply.choices[0].token_ids == [*b"Hello!", EOS]
    stream = chunks(server, extra_body={"return_token_ids": True})
    ids = [one for c in stream for one in getattr(c.choices[0], "token_ids", None) or []]
    assert ids == [*b"Hello!", EOS]


def test_sampling_fields_reach_the_engine(server):
    ask(
        server,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={"65": -100},
        max_tokens=9,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 2,
            "repetition_penalty": 1.1,
            "priority": 3,
            "cache_salt": "mine",
            "rid": "my-id",
        },
    )
    request = server.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.frequency_penalty, params.presence_penalty) == (0.1, -0.2)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.1, 2, 9)
    assert params.logit_bias == {65: -100.0} and params.seed == 11
    assert (request.priority, request.cache_salt, request.request_id) == (3, "mine", "my-id")


def test_content_parts_and_a_prefilled_answer(server):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Sure: "},
    ]
    server.openai.chat.completions.create(
        model="small", messages=messages, extra_body={"continue_final_message": True}
    )
    prompt = bytes(unpack_ids(server.engine.requests[0].prompt_ids).tolist()).decode()
    assert prompt.startswith("<system>Be brief.\n<user>a\nb\n<assistant>Sure:")
    assert not prompt.endswith("<assistant>") and not prompt.endswith("\n")


def test_fields_that_ask_for_nothing_are_fine(server):
    reply = ask(
        server,
        response_format={"type": "text"},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        tool_choice="none",
        user="me",
        extra_body={"no_such_field": {"a": 1}, "regex": None},
    )
    assert reply.choices[0].message.content == "Hello!"


def test_model_names(server):
    for name in ("small", "/models/small", "default"):
        reply = server.openai.chat.completions.create(model=name, messages=HELLO)
        assert reply.model == "small"
