"""`detour serve` of a tiny GLM-5: as a person starts it, asked over HTTP."""

import json

import httpx
import pytest
from running_server import TINY_OPTIONS, RunningServer
from tiny_glm import MODELS, write_tiny_glm

pytestmark = pytest.mark.slow

BODY = {
    "prompt": "The quick brown fox jumps",
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


def completed(*arguments: str) -> list[str]:
    """The texts of the same completion asked for alone, and by four at once after it."""
    running = RunningServer(*arguments, *TINY_OPTIONS)
    try:
        url = f"{running.wait_until_up().url}/v1/completions"
        bodies = [BODY, {**BODY, "prompt": [BODY["prompt"]] * 4}]
        replies = [httpx.post(url, json=body, timeout=60).json() for body in bodies]
    finally:
        running.stop()
    assert replies[0]["usage"]["completion_tokens"] == 40
    return [choice["text"] for reply in replies for choice in reply["choices"]]


@pytest.mark.parametrize("kv", ["auto", "bf16", "fp8_e4m3"])
def test_a_checkpoint_is_served(kv, tmp_path):
    folder = write_tiny_glm(tmp_path, "glm52")
    texts = completed("--model", str(folder), "--kv-cache-dtype", kv, "--dtype", "float32")
    assert len(texts) == 5 and len(set(texts)) == 1 and texts[0]


@pytest.mark.parametrize("name", MODELS)
def test_dummy_weights_are_served_from_a_configuration_alone(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    assert completed("--model", str(tmp_path), "--load-format", "dummy")[0]


def test_a_cache_that_rows_cannot_be_packed_for_ends_the_start_with_a_sentence(tmp_path):
    folder = write_tiny_glm(tmp_path, "glm5", kv_lora_rank=192)
    running = RunningServer("--model", str(folder), "--kv-cache-dtype", "fp8_e4m3", *TINY_OPTIONS)
    assert running.wait() in (1, 2)
    said = "".join(running.lines)
    assert "rank of whole blocks of 128, not 192" in said.splitlines()[-1]
    assert "Traceback" not in said
