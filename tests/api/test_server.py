"""Health, models, information, control, metrics; keys, CORS and request ids."""

import threading
import time

import openai
import pytest
from fake_engine import EOS, FakeEngine
from loopback import serve

from detour.engine.request import Finish

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_generates_nothing(server, path):
    reply = server.http.get(path)
    assert (reply.status_code, reply.json()) == (200, {"status": "ready", "message": ""})
    assert server.http.head("/health").status_code == 200
    assert server.engine.requests == []


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
def test_health_says_the_state(server, state):
    server.engine.state, server.engine.failure = state, "Because."
    reply = server.http.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"status": state, "message": "Because."})


def test_health_generate(server):
    assert server.http.get("/health_generate").status_code == 200
    assert server.engine.requests[0].params.max_tokens == 1
    server.engine.finish = Finish(0, "error", -1, "The worker is gone.", 503)
    assert server.http.get("/health_generate").status_code == 503


def test_models(server):
    cards = list(server.openai.models.list())
    assert [card.id for card in cards] == ["small"] and cards[0].max_model_len == 2048
    assert server.openai.models.retrieve("small").root == "/models/small"
    server.engine.state = "starting"  # clients poll this to learn when they may begin
    assert server.http.get("/v1/models").status_code == 503


def test_model_and_server_info(server):
    for path in ("/model_info", "/get_model_info"):
        info = server.http.get(path).json()
        assert info["model_path"] == info["tokenizer_path"] == "/models/small"
        assert info["is_generation"] is True
    for path in ("/server_info", "/get_server_info"):
        info = server.http.get(path).json()
        assert info["internal_states"][0]["running"] == 0
        assert info["max_total_num_tokens"] == 256 * 16 and info["version"]


def test_loads(server):
    loads = server.http.get("/v1/loads").json()
    assert loads["loads"][0]["num_reqs"] == 0 and loads["aggregate"]["total_reqs"] == 0
    assert server.http.get("/get_load").json()[0]["num_waiting_reqs"] == 0


def test_flush_cache(server):
    before = server.engine.flushes
    assert server.http.get("/flush_cache").status_code == 200
    assert server.http.post("/flush_cache?timeout=30").text == "Cache flushed.\n"
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert server.engine.flushes == before + 3


def test_tokenize_and_back(server):
    for prefix in ("", "/v1"):
        body = {"prompt": "hé", "add_special_tokens": False}
        reply = server.http.post(f"{prefix}/tokenize", json=body).json()
        assert reply == {"tokens": [*"hé".encode()], "count": 3, "max_model_len": 2048}
        reply = server.http.post(f"{prefix}/detokenize", json={"tokens": reply["tokens"]}).json()
        assert reply["text"] == reply["prompt"] == "hé"
    reply = server.http.post("/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert reply["count"] == [2, 3]
    reply = server.http.post("/tokenize", json={"messages": HELLO}).json()
    assert bytes(reply["tokens"]) == b"<user>Hi\n<assistant>"
    reply = server.http.post("/detokenize", json={"tokens": [[97], [98, EOS]]}).json()
    assert reply["text"] == ["a", "b"]


def test_abort_request_gives_what_there_is(server):
    engine = server.engine
    engine.auto = False
    results = []

    def ask():
        body = {"model": "small", "messages": HELLO, "extra_body": {"rid": "mine"}}
        results.append(server.openai.chat.completions.create(**body))

    thread = threading.Thread(target=ask)
    thread.start()
    server.until(lambda: engine.open_sequences == 1)
    server.on_loop(engine.step)
    server.on_loop(engine.step)
    assert server.http.post("/abort_request", json={"rid": "other"}).status_code == 404
    assert server.http.post("/abort_request", json={}).status_code == 400
    assert server.http.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
    thread.join(10)
    choice = results[0].choices[0]
    assert (choice.message.content, choice.finish_reason) == ("He", "abort")
    assert engine.aborted == [engine.requests[0].sid]
    assert server.http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}


def test_request_id_comes_back(server):
    reply = server.http.get("/health", headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert len(server.http.get("/health").headers["x-request-id"]) == 24
    reply = server.http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "abc-2"}
    )
    assert reply.json()["id"] == "cmpl-abc-2"
    assert server.engine.requests[0].request_id == "abc-2"


def test_metrics(server):
    def values():
        text = server.http.get("/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = values()
    list(server.openai.chat.completions.create(model="small", messages=HELLO, stream=True))
    after = values()
    label = '{model_name="small"}'

    def grew(name):
        return after[name] - before.get(name, 0)

    for prefix in ("detour_", "vllm:", "sglang:"):
        assert grew(f"{prefix}generation_tokens_total{label}") == 7
        assert grew(f"{prefix}prompt_tokens_total{label}") == 20
        assert grew(f"{prefix}time_to_first_token_seconds_count{label}") == 1
        assert grew(f"{prefix}inter_token_latency_seconds_count{label}") == 6
        assert grew(f"{prefix}e2e_request_latency_seconds_count{label}") == 1
    bucket = 'detour_e2e_request_latency_seconds_bucket{le="+Inf",model_name="small"}'
    assert grew(bucket) == 1
    assert grew('vllm:request_success_total{finished_reason="stop",model_name="small"}') == 1
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert grew('detour_http_responses_total{route="/v1/chat/completions",status="200"}') == 1
    assert "process_resident_memory_bytes" in after


def test_docs_say_a_sentence_for_every_field(server):
    schema = server.http.get("/openapi.json").json()
    assert server.http.get("/docs").status_code == 200
    for name in ("ChatRequest", "CompletionRequest", "GenerateRequest", "NativeSampling"):
        for field, entry in schema["components"]["schemas"][name]["properties"].items():
            assert entry.get("description", "").endswith((".", ")")), (name, field)


@pytest.fixture(scope="module")
def keyed():
    yield from serve(
        FakeEngine(),
        api_key="sesame",
        admin_api_key="boss",
        cors_origins=("http://a.example",),
        generation_defaults={"temperature": 0.25, "top_k": 7},
        default_deadline=30.0,
        max_body_bytes=1000,
        served_model_names=(),
    )


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_api_key(keyed):
    for headers in ({}, bearer("wrong"), {"authorization": "Basic sesame"}):
        reply = keyed.http.get("/v1/models", headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert keyed.http.get("/v1/models", headers=bearer("sesame")).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/health_generate"):
        assert keyed.http.get(path).status_code == 200
    assert list(keyed.openai.models.list())
    with pytest.raises(openai.AuthenticationError):
        keyed.openai.with_options(api_key="wrong").models.list()


def test_control_routes_take_the_admin_key(keyed):
    assert keyed.http.post("/flush_cache", headers=bearer("sesame")).status_code == 401
    assert keyed.http.post("/flush_cache", headers=bearer("boss")).status_code == 200


def test_cors(keyed):
    headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
    reply = keyed.http.options("/v1/chat/completions", headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "http://a.example"
    reply = keyed.http.get("/v1/models", headers={"origin": "http://a.example"})
    assert reply.status_code == 401 and "access-control-allow-origin" in reply.headers
    reply = keyed.http.get("/health", headers={"origin": "http://b.example"})
    assert "access-control-allow-origin" not in reply.headers


def test_defaults_of_the_model(keyed):
    reply = keyed.openai.completions.create(model="/models/small", prompt="a", temperature=1.0)
    assert reply.model == "/models/small"
    request = keyed.engine.requests[-1]
    assert (request.params.temperature, request.params.top_k) == (1.0, 7)
    assert 0 < request.deadline - time.time() < 30
    keyed.openai.completions.create(model="default", prompt="a", extra_body={"top_k": -1})
    params = keyed.engine.requests[-1].params
    assert (params.temperature, params.top_k) == (0.25, 0)
    keyed.openai.completions.create(model="default", prompt="a", extra_body={"timeout": 1.0})
    assert keyed.engine.requests[-1].deadline - time.time() < 1


def test_body_limit_is_a_setting(keyed):
    body = {"prompt": "a" * 1000}
    reply = keyed.http.post("/v1/completions", json=body, headers=bearer("sesame"))
    assert reply.status_code == 413 and "1000 bytes" in reply.json()["error"]["message"]
