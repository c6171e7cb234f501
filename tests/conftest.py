"""Fixtures that every part's tests may use."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import TINY_OPTIONS, RunningServer
from tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def server(tiny_llama: Path) -> Iterator[RunningServer]:
    """A real server, both processes, on the tiny model; for tests that do not end it."""
    running = RunningServer("--model", str(tiny_llama), *TINY_OPTIONS)
    try:
        yield running.wait_until_up()
    finally:
        running.stop()


def pytest_sessionfinish() -> None:
    """Loops under test freeze what they find; libraries report what is left at the end as leaks."""
    gc.unfreeze()
