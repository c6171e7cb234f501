"""/generate: SGLang's native route."""

import json

import pytest
from fake_engine import BOS, EOS, logprob_of, says

from detour.engine.request import unpack_ids


def generate(server, **body):
    reply = server.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(server, **body):
    reply = server.http.post("/generate", json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n")]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line) for line in lines[:-2]]


def test_one_text(server):
    server.engine.cached_tokens = 2
    result = generate(server, text="ab", rid="mine")
    assert result["text"] == "Hello!" and result["output_ids"] == [*b"Hello!", EOS]
    meta = result["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 7, 2)


def test_length(server):
    meta = generate(server, text="ab", sampling_params={"max_new_tokens": 3})["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}


def test_default_is_128_tokens(server):
    server.engine.script = says("x" * 500)
    assert generate(server, text="ab")["meta_info"]["completion_tokens"] == 128


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"text": ["a", "b"]}, [[BOS, 97], [BOS, 98]]),
        ({"text": ["a"]}, [[BOS, 97]]),
        ({"input_ids": [[97], [98, 99]]}, [[97], [98, 99]]),
    ],
)
def test_lists_give_lists(server, body, ids):
    results = generate(server, **body)
    assert [unpack_ids(r.prompt_ids).tolist() for r in server.engine.requests] == ids
    assert [result["text"] for result in results] == ["Hello!"] * len(ids)


def test_ids_in_one_row(server):
    assert generate(server, input_ids=[97, 98])["meta_info"]["prompt_tokens"] == 2


def test_params_for_each_prompt(server):
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    results = generate(server, text=["a", "b"], sampling_params=params, rid=["x", "y"])
    assert [result["text"] for result in results] == ["H", "He"]
    assert [result["meta_info"]["id"] for result in results] == ["x", "y"]


def test_n_gives_a_list(server):
    results = generate(server, text="a", sampling_params={"n": 3})
    assert len(results) == 3 and len({r["meta_info"]["id"] for r in results}) == 3


def test_stream_carries_all_text_so_far(server):
    server.engine.script = says("ab😀")
    chunks = events(server, text="x")
    texts = [chunk["text"] for chunk in chunks]
    assert texts[0] == "a" and texts[-1] == "ab😀"
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert not any("\ufffd" in text for text in texts)
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 7
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_streamed_list_carries_the_index(server):
    chunks = events(server, text=["a", "b"])
    last = {chunk["index"]: chunk["text"] for chunk in chunks}
    assert last == {0: "Hello!", 1: "Hello!"}


def test_logprobs(server):
    result = generate(
        server,
        input_ids=[97, 98, 99],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 1},
    )
    meta = result["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 97, "a"]
    assert meta["input_token_logprobs"][1] == [logprob_of(98), 98, "b"]
    assert meta["output_token_logprobs"] == [[logprob_of(72), 72, "H"]]
    assert [one[1] for one in meta["output_top_logprobs"][0]] == [72, 0]
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][2]) == 2


def test_logprobs_of_the_output_alone(server):
    body = {"text": "a", "return_logprob": True, "logprob_start_len": -1}
    meta = generate(server, **body)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 7 and meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"][0] == [logprob_of(72), 72, None]
