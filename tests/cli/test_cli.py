"""The commands as a person types them: what they print, how they end, what a mistake gets."""

import io
import json
import sys

import httpx
import pytest
import yaml
from tiny_glm import MODELS

from detour.cli import COMMANDS, main
from detour.cli.chat import Conversation
from detour.errors import Unavailable


def run(capsys, *words):
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_names_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].startswith("detour ")


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "fetch"])
def test_each_command_has_its_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--model" in out
    assert "--tp-size" not in out, "accepted flags are in docs/flags.md"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serv"], "detour: there is no command serv. Did you mean serve?"),
        (
            ["serve", "--portt", "1"],
            "detour serve: There is no option --portt. Did you mean --port?",
        ),
        (
            ["serve", "--host", "no.such.host.invalid"],
            "detour serve: --host no.such.host.invalid is no",
        ),
        (["generate"], "detour generate: There is nothing to continue: give --prompt or --input."),
        (["generate", "--input", "/no/file"], "detour generate: --input /no/file cannot be read: "),
        (["bench", "nothing"], "Usage: detour bench WHAT"),
        (["show", "nothing"], "Usage: detour show WHAT"),
    ],
)
def test_a_mistake_gets_a_sentence_and_status_2(capsys, words, sentence):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith(sentence)
    assert "Traceback" not in err


def test_a_model_that_is_not_there_gets_a_sentence(capsys):
    status, _, err = run(capsys, "serve", "--port", "0", "--model", "/no/such/model")
    assert status == 1
    assert err == "detour serve: There is no model at /no/such/model: the path does not exist.\n"


def test_an_occupied_port_gets_a_sentence_before_a_model_is_looked_for(capsys, server):
    port = server.url.rsplit(":", 1)[1]
    status, _, err = run(capsys, "serve", "--port", port, "--model", "/no/such/model")
    assert status == 2
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use." in err


def test_show_config_prints_a_file_for_config(capsys, tmp_path):
    status, out, err = run(capsys, "show", "config", "--port", "99", "--tp", "8", "--api-key", "k")
    assert status == 0
    assert yaml.safe_load(out)["port"] == 99
    assert yaml.safe_load(out)["api_key"] == "***"
    assert err.startswith("--tp 8: one device is used")
    file = tmp_path / "config.yaml"
    file.write_text(out)
    again = run(capsys, "show", "config", "--config", str(file))[1]
    assert again == out


def test_generate_writes_a_line_a_prompt(capsys, tmp_path, tiny_llama):
    prompts, texts = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "one"}\ntwo two\n\n{"text": "three"}\n')
    words = ["--model", str(tiny_llama), "--input", str(prompts), "--output", str(texts)]
    words += ["--max-tokens", "4", "--max-total-tokens", "512", "--threads", "1"]
    status, _, err = run(capsys, "generate", *words)
    assert status == 0
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two two", "three"]
    assert all(0 < line["completion_tokens"] <= 4 and line["error"] == "" for line in lines)
    assert err.splitlines()[-1].startswith("3 prompts, ")


def test_chat_with_a_server(capsys, monkeypatch, server):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/nonsense\n/exit\n"))
    status, out, err = run(capsys, "chat", "--url", server.url, "--max-tokens", "5")
    assert status == 0
    assert out.strip()
    assert "There is no command /nonsense." in err


def test_chat_says_when_no_server_is_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    _, _, err = run(capsys, "chat", "--url", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in err


class TestConversation:
    """History, without a model: the answer repeats how many messages it was given."""

    @pytest.fixture
    def talk(self):
        def answer(messages):
            if messages[-1]["content"] == "fail":
                raise Unavailable("The engine is gone.")
            yield "".join(message["role"][0] for message in messages)

        return Conversation(answer, "")

    def test_it_keeps_the_history_until_reset(self, talk, capsys):
        for line in ("a", "b", "/reset", "c", "/system be kind", "d", "e"):
            talk.take(line)
        assert capsys.readouterr().out.split() == ["u", "uau", "u", "su", "suau"]

    def test_a_question_that_failed_is_taken_back(self, talk, capsys):
        for line in ("a", "fail", "b"):
            talk.take(line)
        captured = capsys.readouterr()
        assert captured.out.split() == ["u", "uau"]
        assert captured.err == "The engine is gone.\n"


def test_the_server_serves(server):
    """The model says nothing sensible; that the whole way works is what counts."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] <= 3
    config = httpx.get(f"{server.url}/server_info", timeout=60).json()
    assert config["max_running_requests"] == 16


@pytest.fixture
def glm_config(tmp_path):
    """A configuration alone, as a file of any name."""
    file = tmp_path / "glm.json"
    file.write_text(json.dumps(MODELS["glm5"] | {"dtype": "bfloat16"}))
    return str(file)


def test_doctor_needs_no_weights_and_no_such_device(capsys, glm_config):
    words = ["doctor", glm_config, "--gpu", "h200", "--kv-cache-dtype", "fp8_e4m3"]
    status, out, err = run(capsys, *words, "--concurrency", "2", "32", "--mean-context", "100")
    assert (status, err) == (0, "")
    for part in ("routed experts", "indexer", "KV of a token", "sparse_mla", "Bound of a decode"):
        assert part in out
    assert out.rstrip().endswith("It would serve.")


def test_doctor_says_what_has_to_be_changed(capsys, glm_config):
    status, out, _ = run(
        capsys, "doctor", glm_config, "--gpu", "h200", "--context-length", "9999", "--tp", "2",
        "--schedule-policy", "lpm", "--disable-radix-cache", "--attention-backend", "triton",
    )  # fmt: skip
    said = " ".join(out.partition("To be changed:")[2].split())
    assert status == 1
    assert "- --context-length is 9999, but the model is made for 1024 tokens" in said
    assert "- --tp 2: one device is used" in said
    wrong, _, odd = said.partition("To know:")
    assert "lpm orders requests by their cached prefixes" in odd
    assert "attention, an op that glm_moe_dsa does not use" in odd and "would serve" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tp", "3"], "detour doctor: 320 vocabulary entries cannot be shared by 3 ranks."),
        (["--tp", "many"], "detour doctor: --tp-size takes a number of ranks, not 'many'."),
        (["--gpu", "h2000"], "detour doctor: Argument --gpu: invalid choice: 'h2000'"),
        (["--quantization", "fp8"], "detour doctor: --quantization fp8: "),
    ],
)
def test_doctor_refuses_with_a_sentence(capsys, glm_config, words, sentence):
    status, _, err = run(capsys, "doctor", glm_config, *words)
    assert status != 0 and err.startswith(sentence)


def test_show_memory_and_backends_read_no_weights(capsys, tiny_llama):
    status, out, _ = run(capsys, "show", "memory", str(tiny_llama), "--device", "cpu")
    assert status == 0 and "tokens that fit" in out and "dense blocks" in out
    assert "Bound" not in out, "nothing is known of this processor's speed"
    status, out, _ = run(capsys, "show", "backends", str(tiny_llama), "--gpu", "b200")
    assert status == 0 and "triton" in out and "B200" in out
