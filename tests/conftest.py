"""Fixtures that every part's tests may use; Triton interpreted where there is no GPU."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from running_server import TINY_OPTIONS, RunningServer
from tiny import write_tiny

# Triton reads this where it is first imported, its own library too, which any test may cause: so
# it is set before all of them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named as the model is then served: a llama of 60 thousand random numbers."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny(folder, max_position_embeddings=1024, tie_word_embeddings=True)


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
