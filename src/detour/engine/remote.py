"""EngineClient: the engine handle for an engine in another process; on the front's event loop.

Knows sids, listeners and messages; nothing of text or HTTP. One task receives; a step's tokens are
handed to their listeners by plain calls. An engine may be lost and another take its place: what is
open goes on there after its last token, and listeners hear nothing of it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from detour.engine.channel import (
    Abort,
    AskStats,
    Drain,
    Drained,
    Failed,
    FlushCache,
    Flushed,
    Ready,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    ToFront,
)
from detour.engine.client import EngineState, Listener
from detour.engine.journal import Journal
from detour.engine.request import Finish, Request, TokenEvents, unpack_ids
from detour.errors import Unavailable

log = logging.getLogger(__name__)

_T = TypeVar("_T")

ANSWER_SECONDS = 30.0  # an engine that says nothing for so long to a question is not answering
_BREATH = 128  # listeners served before other tasks of the loop get a turn


class FrontLink(Protocol):
    """The front's end of the channel (engine.channel.FrontChannel; a fake in tests)."""

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> ToFront: ...


class _Open:
    """A sequence that has not ended."""

    __slots__ = ("append", "listener", "scored", "started")

    def __init__(self, listener: Listener, append: Callable[[int], None]) -> None:
        self.listener = listener
        self.append = append  # to the journal
        # What the listener has heard, so that a second engine does not say it again.
        self.started = False
        self.scored = 0  # prompt positions


class EngineClient:
    """Implements EngineHandle (engine.client). `run` must be running for anything to arrive.

    `max_queued` is how many sequences may be open beyond those the engine can run at once; one more
    is refused with Unavailable.
    """

    def __init__(self, link: FrontLink, max_queued: int, journal_bytes: int = 1 << 30) -> None:
        self._link = link
        self._max_queued = max_queued
        self._journal = Journal(journal_bytes)
        self._open: dict[int, _Open] = {}
        self._next_sid = 1
        self._phase: EngineState = "starting"  # never "draining", which may come in any phase
        self._draining = False
        self._ready: Ready | None = None
        self._failure = ""
        self._last_words = ""
        self._tokens = 0
        self._asked_at = 0.0  # when `ask_alive` began to wait for any message; 0 = it does not
        self._changed = asyncio.Event()  # state or drained changed; replaced at each change
        self._drained = False
        self._stats: asyncio.Future[Stats] | None = None
        self._flush: asyncio.Future[str] | None = None

    @property
    def state(self) -> EngineState:
        return "draining" if self._draining and self._phase != "failed" else self._phase

    @property
    def last_words(self) -> str:
        """What an engine said of its own end: whoever watches the process decides what follows."""
        return self._last_words

    @property
    def tokens(self) -> int:
        """Handed to listeners so far."""
        return self._tokens

    @property
    def failure(self) -> str:
        """Why state is "failed": one sentence; "" before."""
        return self._failure

    @property
    def ready(self) -> Ready:
        if self._ready is None:
            raise Unavailable(self._failure or "The engine is starting; try again soon.")
        return self._ready

    @property
    def open_sequences(self) -> int:
        return len(self._open)

    def new_sids(self, n: int) -> range:
        first = self._next_sid
        self._next_sid += n
        return range(first, first + n)

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> None:
        if self._phase == "failed":
            raise Unavailable(self._failure)
        if self._draining:
            raise Unavailable("The server is shutting down and takes no new requests.")
        room = self.ready.max_slots + self._max_queued - len(self._open)
        if len(requests) > room:
            raise Unavailable(
                f"The queue is full ({len(self._open)} sequences open); try again later.",
                code="queue_full",
            )
        self._journal.add(requests)
        for request, listener in zip(requests, listeners, strict=True):
            append = self._journal.tokens(request.sid).append
            self._open[request.sid] = _Open(listener, append)
        self._tell(Submit(list(requests)))

    def abort(self, sids: Sequence[int]) -> None:
        known = [sid for sid in sids if self._open.pop(sid, None) is not None]
        for sid in known:
            self._journal.drop(sid)
        self._stop(known)

    def _stop(self, sids: list[int]) -> None:
        if sids:
            self._tell(Abort(sids))

    async def stats(self) -> Stats:
        """Raises Unavailable when the engine does not answer."""
        if self._stats is None or self._stats.done():
            self._refuse_without_engine()
            self._stats = asyncio.get_running_loop().create_future()
            self._link.send(AskStats())
        return await _answer(self._stats)

    async def flush_cache(self) -> str:
        if self._flush is None or self._flush.done():
            self._refuse_without_engine()
            self._flush = asyncio.get_running_loop().create_future()
            self._link.send(FlushCache())
        return await _answer(self._flush)

    async def wait_until_up(self) -> None:
        """Returns once state is no longer "starting"."""
        while self._phase == "starting":
            await self._changed.wait()

    async def drain(self) -> None:
        """Take no more requests, let the open ones finish, return when the engine has ended."""
        self._draining = True
        self._wake_waiters()
        self._tell(Drain())
        while not (self._drained or self._phase == "failed"):
            await self._changed.wait()

    def ask_alive(self) -> float:
        """Seconds that the engine has said nothing since it was asked for a sign; asks if it is not.

        An engine answers between two steps, so this is what its step takes, or that it hangs.
        """
        if self._phase != "ready" or not self._open:
            self._asked_at = 0.0
            return 0.0
        now = time.monotonic()
        if not self._asked_at:
            self._asked_at = now
            self._tell(AskStats())
        return now - self._asked_at

    def shut_down(self) -> None:
        """End the engine now; open sequences end with reason "abort"."""
        self._tell(Shutdown())

    def continuations(self) -> list[Request]:
        """What a new engine must be given to go on where this one stopped."""
        return self._journal.continuations()

    def lose(self) -> None:
        """The engine is gone and another will be started: what is open waits for `renew`."""
        self._set_phase("recovering")
        self._asked_at = 0.0
        self._refuse_questions("The engine is being started again; try again soon.")
        if self._draining and not self._open:
            self._drained = True
            self._wake_waiters()

    def renew(self, link: FrontLink) -> None:
        """Speak to another engine, which is told of all that is open once it is ready. `run` must
        be run anew for it."""
        self._link = link

    async def run(self) -> None:
        """Receive from the engine there is now, until cancelled or it is renewed."""
        link = self._link
        while self._link is link:
            message = await link.receive()
            self._asked_at = 0.0
            if isinstance(message, TokenEvents):
                await self._deliver(message)
            else:
                self._answer_arrived(message)

    def fail(self, message: str) -> None:
        """The engine is gone: end every open sequence with an error, refuse new ones."""
        self._failure = message
        self._set_phase("failed")
        self._refuse_questions(message)
        self.end_open(message)

    def end_open(self, message: str) -> None:
        """End every open sequence with an error that asks the client to try again."""
        self._stop(list(self._open))
        for sid in list(self._open):
            entry = self._close(sid)
            if entry is not None:
                entry.listener.on_finish(Finish(sid, "error", message=message, status=503))
                self._end_step(sid, entry.listener)

    def _refuse_without_engine(self) -> None:
        if self._phase == "failed":
            raise Unavailable(self._failure)
        if self._phase == "recovering":
            raise Unavailable("The engine is being started again; try again soon.")
        self.ready  # noqa: B018 - raises while starting

    def _refuse_questions(self, why: str) -> None:
        for question in (self._stats, self._flush):
            if question is not None and not question.done():
                question.set_exception(Unavailable(why))

    def _tell(self, message: ToEngine) -> None:
        """While there is no engine nothing is said: the next one is told how things stand."""
        if self._phase in ("starting", "ready"):
            self._link.send(message)

    def _set_phase(self, phase: EngineState) -> None:
        self._phase = phase
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _answer_arrived(self, message: ToFront) -> None:
        match message:
            case Ready():
                self._ready = message
                if self._phase != "failed":
                    self._resume()
            case Stats():
                if self._stats is not None and not self._stats.done():
                    self._stats.set_result(message)
            case Flushed():
                if self._flush is not None and not self._flush.done():
                    self._flush.set_result(message.message)
            case Drained():
                self._drained = True
                self._wake_waiters()
            case Failed():
                self._last_words = message.message
                if self._phase == "starting":
                    self.fail(message.message)

    def _resume(self) -> None:
        """A new engine is ready: it is told of all that is open."""
        recovering = self._phase == "recovering"
        self._set_phase("ready")
        if recovering and self._open:
            self._tell(Submit(self._journal.continuations()))
        if recovering and self._draining:
            self._tell(Drain())

    async def _deliver(self, events: TokenEvents) -> None:
        sids = np.frombuffer(events.sids, dtype=np.int64).tolist()
        if not (events.started or events.finished or events.logprobs or events.prompt_logprobs):
            await self._deliver_tokens(sids, unpack_ids(events.tokens).tolist())
            return
        touched: dict[int, Listener] = {}
        opened = self._open
        self._announce(events, touched)
        for sid, token in zip(sids, unpack_ids(events.tokens).tolist(), strict=True):
            entry = opened.get(sid)
            if entry is not None:
                entry.append(token)
                entry.listener.on_token(token)
                touched[sid] = entry.listener
        self._tokens += len(sids)
        ended = set()
        for finish in events.finished:
            entry = self._close(finish.sid)
            if entry is not None:
                entry.listener.on_finish(finish)
                touched[finish.sid] = entry.listener
                ended.add(finish.sid)
        for served, (sid, listener) in enumerate(touched.items(), 1):
            if sid in opened or sid in ended:  # else aborted meanwhile
                self._end_step(sid, listener)
            if served % _BREATH == 0:
                await asyncio.sleep(0)

    async def _deliver_tokens(self, sids: list[int], tokens: list[int]) -> None:
        """A step in which nothing begins or ends, as nearly all are: one pass."""
        opened = self._open
        self._tokens += len(sids)
        served = 0
        for sid, token in zip(sids, tokens, strict=True):
            entry = opened.get(sid)
            if entry is None:
                continue
            entry.append(token)
            listener = entry.listener
            listener.on_token(token)
            try:
                listener.on_step_end()
            except Exception:
                self._listener_failed(sid)
            served += 1
            if served % _BREATH == 0:
                await asyncio.sleep(0)

    def _listener_failed(self, sid: int) -> None:
        """One client's fault must not stop the others' tokens."""
        log.exception("sequence %d: its listener failed; it is aborted", sid)
        self.abort([sid])

    def _announce(self, events: TokenEvents, touched: dict[int, Listener]) -> None:
        """Hand out what comes before the tokens of a message."""
        opened = self._open
        for started in events.started:
            entry = opened.get(started.sid)
            if entry is not None and not entry.started:
                entry.started = True
                touched[started.sid] = entry.listener
                entry.listener.on_started(started)
        for prompt_logprobs in events.prompt_logprobs:
            entry = opened.get(prompt_logprobs.sid)
            fresh = prompt_logprobs if entry is None else prompt_logprobs.after(entry.scored)
            if entry is not None and (fresh.logprobs or not entry.scored):
                entry.scored = fresh.start + len(fresh.logprobs) // 4
                touched[fresh.sid] = entry.listener
                entry.listener.on_prompt_logprobs(fresh)
        for logprobs in events.logprobs:
            entry = opened.get(logprobs.sid)
            if entry is not None:
                entry.listener.on_logprobs(logprobs)

    def _end_step(self, sid: int, listener: Listener) -> None:
        try:
            listener.on_step_end()
        except Exception:
            self._listener_failed(sid)

    def _close(self, sid: int) -> _Open | None:
        self._journal.drop(sid)
        return self._open.pop(sid, None)


async def _answer(question: "asyncio.Future[_T]") -> _T:
    """The shared answer to a question that several may have asked."""
    try:
        return await asyncio.wait_for(asyncio.shield(question), ANSWER_SECONDS)
    except TimeoutError:
        raise Unavailable(f"The engine has not answered within {ANSWER_SECONDS:.0f} s.") from None
