"""The engine process as the front sees it: its end is noticed, explained, and never leaves one behind."""

import os
import sys

import pytest

from detour.engine.supervisor import REFUSED_TO_START, Supervisor

WAIT_FOR_END = "import sys; sys.stdin.read()"


def supervisor(program):
    return Supervisor([sys.executable, "-S", "-c", program], dict(os.environ))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("raise SystemExit(0)", ""),
        ("raise SystemExit(7)", "The engine process ended with exit status 7."),
        ("import os; os.kill(os.getpid(), 11)", "The engine process was ended by SIGSEGV."),
        (
            "import os; os.kill(os.getpid(), 9)",
            "The engine process was ended by SIGKILL (the system's memory may have run out).",
        ),
    ],
)
async def test_an_engine_that_ends_is_explained(program, sentence):
    process = supervisor(program)
    await process.start(b"")
    assert await process.watch() == sentence


@pytest.mark.parametrize(("status", "lines"), [(7, 1), (REFUSED_TO_START, 0)])
async def test_an_engine_that_said_why_it_will_not_start_is_not_logged_as_well(
    caplog, status, lines
):
    process = supervisor(f"raise SystemExit({status})")
    await process.start(b"")
    assert await process.watch() == f"The engine process ended with exit status {status}."
    assert len(caplog.records) == lines


async def test_it_gets_its_first_words():
    process = supervisor("import sys; sys.exit(len(sys.stdin.readline()))")
    await process.start(b"hello\n")
    await process.watch()
    assert process.exit_status == 6


async def test_ending_kills_what_does_not_end_by_itself_and_reports_nothing():
    process = supervisor(WAIT_FOR_END)
    await process.start(b"")
    await process.end(grace=0.0)
    assert await process.watch() == ""
    assert process.exit_status == -9
    await process.end(grace=0.0)


async def test_it_can_be_started_anew():
    process = supervisor("raise SystemExit(7)")
    await process.start(b"")
    first = process.pid
    assert await process.watch() != ""
    await process.start(b"")
    assert process.pid != first
    assert await process.watch() != ""
