"""Starts, watches and ends the engine process. Knows processes and signals, not what they compute.

An engine that ends by itself is reported once, as a sentence; what follows is for others to decide.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

REFUSED_TO_START = 3  # exit status of an engine that has sent Failed with its reason


class Supervisor:
    """One engine process at a time, started by `command`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: Process | None = None
        self._ending = False

    @property
    def pid(self) -> int:
        """Of the engine process; 0 before it is started."""
        return self._process.pid if self._process else 0

    async def start(self, first_words: bytes) -> None:
        """`first_words` is written to its standard input, which stays open, so that it can tell
        when this process is gone."""
        self._ending = False
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, env=dict(self._environment)
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # watch() will tell
            self._process.stdin.write(first_words)
            await self._process.stdin.drain()

    async def watch(self) -> str:
        """Waits for the end of the process. Says why in a sentence; "" if told to or done."""
        assert self._process is not None
        status = await self._process.wait()
        if self._ending or status == 0:
            return ""
        why = f"The engine process {_ending(status)}."
        if status != REFUSED_TO_START:  # its own sentence is shown instead
            log.error(why)
        return why

    @property
    def exit_status(self) -> int:
        """Of the process that has ended, negative for a signal; -1000 while there is none."""
        status = self._process.returncode if self._process else None
        return -1000 if status is None else status

    async def end(self, grace: float) -> None:
        """Let the process end by itself for `grace` seconds, then end it. May be called twice."""
        self._ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace)
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """End the process now, whatever it does."""
        self._ending = True
        self.strike()

    def strike(self) -> None:
        """As `kill`, but it counts as a death: `watch` tells of it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the system's memory may have run out)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
