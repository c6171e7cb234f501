"""The server's life as an operator sees it: both processes, signals, and what is left behind."""

import json
import os
import select
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from running_server import TINY_OPTIONS, RunningServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture
def start(tiny_llama, tmp_path):
    """Starts servers; their channel files lie in tmp_path."""
    started: list[RunningServer] = []

    def start(*arguments):
        running = RunningServer(
            "--model", str(tiny_llama), *TINY_OPTIONS, *arguments, TMPDIR=str(tmp_path)
        )
        started.append(running)
        return running

    yield start
    for running in started:
        running.stop()


def long_stream(running, tokens=900):
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60)


def wait_for_end(pid):
    """Returns when the process is gone; the test's time limit is what ends the wait."""
    if not Path(f"/proc/{pid}").exists():
        return
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], 60)
    finally:
        os.close(descriptor)


def test_sigterm_lets_open_requests_finish(start, tmp_path):
    running = start().wait_until_up()
    engine = running.engine_pid
    with long_stream(running, tokens=200) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGTERM)  # as systemd does, which signals every process of a service
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert running.wait() == 0
    wait_for_end(engine)
    assert list(tmp_path.glob("detour-*")) == []


def test_requests_without_time_left_are_told_so(start):
    running = start("--drain-timeout", "1").wait_until_up()
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
    url = f"{running.url}/v1/completions"
    with ThreadPoolExecutor(1) as pool, long_stream(running, tokens=1000) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(running.engine_pid, signal.SIGSTOP)  # so that they cannot finish in time
        whole = pool.submit(httpx.post, url, json=body, timeout=60)
        time.sleep(1)  # it is with the front by then, which has no sign of it to show
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "no time left" in rest[-2] and rest[-1] == "data: [DONE]"
    assert whole.result().status_code == 503
    assert "no time left" in whole.result().json()["error"]["message"]
    assert running.wait() == 0


def test_a_second_signal_ends_it_now(start, tmp_path):
    running = start("--drain-timeout", "1000").wait_until_up()
    engine = running.engine_pid
    with long_stream(running) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGINT)
        running.wait_until_said("once more to stop now")
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 1
    assert "Traceback" not in "".join(running.lines)
    wait_for_end(engine)
    assert list(tmp_path.glob("detour-*")) == []


def said(lines):
    """The text of a stream of completion events, and how it ended."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all("error" not in event for event in events), events[-1]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, events[-1]["choices"][0]["finish_reason"]


def test_open_requests_go_on_when_the_engine_is_killed(start, tmp_path):
    running = start("--dtype", "float32").wait_until_up()
    body = {"prompt": "a", "max_tokens": 700, "ignore_eos": True, "stream": True}
    body["temperature"] = 0
    bodies = [body, body | {"seed": 5, "temperature": 1.5}, body | {"frequency_penalty": 0.5}]
    url = f"{running.url}/v1/completions"

    def ask(number):
        with httpx.stream("POST", url, json=bodies[number % 3], timeout=100) as response:
            return said(list(response.iter_lines()))

    undisturbed = [ask(number) for number in range(3)]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, number) for number in range(12)]
        for _ in range(3):
            time.sleep(0.7)
            if not all(answer.done() for answer in answers):
                os.kill(running.engine_pid, signal.SIGKILL)
                running.wait_until_said("starting the engine again")
                running.lines.clear()
                while httpx.get(f"{running.url}/health", timeout=60).status_code != 200:
                    time.sleep(0.1)
        assert [answer.result() for answer in answers] == [
            undisturbed[number % 3] for number in range(12)
        ]
    assert running.stop() == 0
    assert list(tmp_path.glob("detour-*")) == []


def test_an_engine_that_hangs_is_started_again(start):
    running = start("--watchdog-timeout", "4").wait_until_up()
    with long_stream(running, tokens=900) as response:
        lines = response.iter_lines()
        first = next(lines)
        os.kill(running.engine_pid, signal.SIGSTOP)
        _, reason = said([first, *lines])
    assert reason == "length"
    assert any("given no sign for" in line for line in running.lines)
    assert running.stop() == 0


def test_an_engine_that_cannot_be_started_again_is_explained_to_all(start, tiny_llama, tmp_path):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    running = start("--model", str(model)).wait_until_up()
    with long_stream(running) as response:
        lines = response.iter_lines()
        next(lines)
        (model / "model.safetensors").unlink()
        os.kill(running.engine_pid, signal.SIGKILL)
        rest = "\n".join(lines)
    assert "It died 3 times in a row without a token between" in rest
    assert "holds no" in rest or "safetensors" in rest
    health = httpx.get(f"{running.url}/health", timeout=60)
    assert health.status_code == 503
    assert health.json()["status"] == "failed"
    refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert refused.status_code == 503
    assert "times in a row" in refused.json()["error"]["message"]
    assert running.stop() == 0


def test_the_engine_does_not_outlive_a_front_that_is_killed(start, tmp_path):
    running = start().wait_until_up()
    engine = running.engine_pid
    running.process.kill()
    running.wait()
    wait_for_end(engine)
    assert list(tmp_path.glob("detour-*")) == []


def test_a_model_that_cannot_be_served_ends_the_start(start, tiny_llama, tmp_path):
    running = start("--json-model-override-args", '{"hidden_act": "gelu"}')
    assert running.wait() == 2 or running.process.returncode == 1
    said = "".join(running.lines)
    assert "gelu" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert list(tmp_path.glob("detour-*")) == []
