"""The server's life as an operator sees it: both processes, signals, and what is left behind."""

import os
import select
import signal
import sys
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


def test_a_dead_engine_is_explained_to_all(start):
    running = start().wait_until_up()
    with long_stream(running) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(running.engine_pid, signal.SIGKILL)
        rest = "\n".join(lines)
    assert "The engine process was ended by SIGKILL" in rest
    health = httpx.get(f"{running.url}/health", timeout=60)
    assert health.status_code == 503
    assert "SIGKILL" in health.text
    refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert refused.status_code == 503
    assert "SIGKILL" in refused.json()["error"]["message"]
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
