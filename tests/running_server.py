"""Starts `detour serve` as a person does, on a free port, and ends it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

WAIT_SECONDS = 110.0
TINY_OPTIONS = ("--max-total-tokens", "4096", "--max-running-requests", "16", "--threads", "1")


class RunningServer:
    """The process, its URL once it is up, and everything it said."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "detour", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self.url = ""
        self._ended = False
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line)
                if line.startswith("Detour ") and " at http" in line:
                    self.url = line.rsplit(" at ", 1)[1].strip()
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()

    def wait_until_up(self) -> "RunningServer":
        with self._said:
            self._said.wait_for(lambda: self.url or self._ended, WAIT_SECONDS)
        assert self.url, "".join(self.lines)
        return self

    def wait_until_said(self, words: str) -> None:
        with self._said:
            self._said.wait_for(
                lambda: self._ended or any(words in line for line in self.lines), WAIT_SECONDS
            )
        assert any(words in line for line in self.lines), "".join(self.lines)

    @property
    def engine_pid(self) -> int:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(listed.split()[0])

    def wait(self) -> int:
        """The exit status."""
        status = self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.wait()
        finally:
            self.process.kill()
