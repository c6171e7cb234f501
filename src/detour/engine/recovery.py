"""Keeps an engine running: starts one, watches it, and starts another where it dies.

Open requests wait meanwhile and go on in the new engine (engine.remote). Knows processes and
sockets, not what is computed. An engine that dies again and again without a token between ends it.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from detour.engine.channel import FrontChannel
from detour.engine.remote import EngineClient
from detour.engine.supervisor import REFUSED_TO_START, Supervisor

log = logging.getLogger(__name__)

DEATHS_IN_A_ROW = 3  # with no token between them: more of the same would not help
DEATHS_TOGETHER = 60  # within DEATH_WINDOW, whatever was computed between
DEATH_WINDOW = 600.0  # seconds
LAST_WORDS_SECONDS = 2.0  # for a message that an engine sent before it ended

# (address the engine reads, address it writes) -> what it is told at its start
FirstWords = Callable[[str, str], bytes]


class Recovery:
    """`client` speaks to whichever engine runs. Made inside a running event loop.

    An engine that gives no sign for `patience` seconds while requests are open is ended and another
    started; 0 = it may take any time.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        first_words: FirstWords,
        make_client: Callable[[FrontChannel], EngineClient],
        patience: float,
    ) -> None:
        self._supervisor = supervisor
        self._patience = patience
        self._first_words = first_words
        self._open_channel()
        self.client = make_client(self._channel)
        self._receiving: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=DEATHS_TOGETHER)
        self._in_a_row = 0
        self._tokens_at_death = 0

    async def start(self) -> None:
        self._receiving = asyncio.create_task(self.client.run())
        await self._supervisor.start(self._first_words(*self._addresses))

    async def look(self) -> None:
        """Look for an engine that hangs, until cancelled."""
        while self._patience:
            await asyncio.sleep(self._patience / 8)
            silent = self.client.ask_alive()
            if silent > self._patience:
                log.error("the engine has given no sign for %.0f s: it is ended", silent)
                self._supervisor.strike()

    async def keep(self) -> None:
        """Until the engine is told to end, or there is no use in starting another."""
        while why := await self._supervisor.watch():
            client = self.client
            if client.state in ("starting", "failed"):
                await self._fail_at_start(why)
                return
            client.lose()
            if client.state == "draining" and not client.open_sequences:
                return
            if hopeless := self._count_death():
                client.fail(f"{client.last_words or why} {hopeless}")
                return
            count = client.open_sequences
            log.error("starting the engine again; %d open requests will go on in it", count)
            await asyncio.sleep(0.5 * (2**self._in_a_row - 1))
            self._channel.close()  # what is being delivered from it still is
            shutil.rmtree(self._folder, ignore_errors=True)
            self._open_channel()
            client.renew(self._channel)
            await self.start()

    def connected(self) -> None:
        """Both ends speak: the names of the sockets may go."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the engine, if it runs, and leave nothing behind."""
        self._supervisor.kill()
        if self._receiving is not None:
            self._receiving.cancel()
        self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _fail_at_start(self, why: str) -> None:
        if self._supervisor.exit_status == REFUSED_TO_START:
            with contextlib.suppress(TimeoutError):  # its own reason says more
                await asyncio.wait_for(self.client.wait_until_up(), LAST_WORDS_SECONDS)
        if self.client.state != "failed":
            self.client.fail(why)

    def _count_death(self) -> str:
        """Why another start would be of no use; "" = it may help."""
        now = time.monotonic()
        self._in_a_row = 0 if self.client.tokens > self._tokens_at_death else self._in_a_row + 1
        self._tokens_at_death = self.client.tokens
        if self._in_a_row >= DEATHS_IN_A_ROW:
            return f"It died {DEATHS_IN_A_ROW} times in a row without a token between."
        if len(self._deaths) == DEATHS_TOGETHER and now - self._deaths[0] < DEATH_WINDOW:
            return f"It died {DEATHS_TOGETHER} times within {DEATH_WINDOW / 60:.0f} minutes."
        self._deaths.append(now)
        return ""

    def _open_channel(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="detour-"))  # only we may enter it
        self._addresses = (f"ipc://{self._folder}/to-engine", f"ipc://{self._folder}/to-front")
        self._channel = FrontChannel(*self._addresses)
