"""The cases that the project shares between implementations, where they lie beside the repository."""

import importlib.util
from pathlib import Path

import pytest
from parser_cases import Adapter

CASES = Path(__file__).parents[3] / "shared" / "cases"


def load_runner():
    file = CASES / "run_cases.py"
    if not file.is_file():
        return None
    spec = importlib.util.spec_from_file_location("run_cases", file)
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    return runner


RUNNER = load_runner()


@pytest.mark.skipif(RUNNER is None, reason="the shared cases are not beside the repository")
@pytest.mark.parametrize("case", RUNNER.load() if RUNNER else [], ids=lambda case: case["id"])
def test_case(case):
    assert RUNNER.run_case(Adapter(), case) == []


@pytest.mark.slow
@pytest.mark.skipif(RUNNER is None, reason="the shared cases are not beside the repository")
def test_cost_does_not_grow_with_the_length_of_the_answer():
    assert [name for name, good, *_ in RUNNER.perf(Adapter()) if not good] == []
