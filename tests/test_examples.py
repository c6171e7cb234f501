"""Every example runs, on a tiny random model: its words mean nothing, its form must hold."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, server, tiny_llama):
    target = str(tiny_llama) if path.stem == "offline" else server.url
    done = subprocess.run(
        [sys.executable, str(path), target], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "is not the same" not in done.stdout and "another text" not in done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= LINES
