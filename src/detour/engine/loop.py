"""The engine's one loop: receive, plan, execute, commit, emit.

Knows messages, time and that steps can fail; who runs next is the scheduler's, how the executor's.
With depth 2 the next step is submitted before the last one's tokens are back, and what a step gave
is told to the front while the next one computes.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

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
from detour.engine.executor import Executor
from detour.engine.plan import StepPlan
from detour.engine.request import Finish, Request
from detour.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

NAP = 1.0  # seconds; the longest sleep between two looks at the parent
FAULTS_IN_A_ROW = 5  # steps that failed with none between them that worked: the executor is broken
CHECK_EVERY = 10.0  # seconds between two checks of the pages when idle
RATE_OVER = 5.0  # seconds that the token rate is taken over


class Link(Protocol):
    """The engine's end of the channel (engine.channel.EngineChannel)."""

    def receive(self) -> list[ToEngine]: ...

    def wait(self, seconds: float) -> bool: ...

    def send(self, message: ToFront) -> None: ...


class Facts(Protocol):
    """What people ask about a worker."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def backends(self) -> Mapping[str, str]: ...


class Rate:
    """Of a growing total, over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> None:
        if self._marks and now - self._marks[-1][0] < RATE_OVER / 20:
            return
        self._marks.append((now, total))
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        if len(self._marks) < 2:
            return 0.0
        (then, before), (_, total) = self._marks[0], self._marks[-1]
        return (total - before) / (now - then)

    def _forget(self, now: float) -> None:
        while self._marks and now - self._marks[0][0] > RATE_OVER:
            self._marks.popleft()


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        link: Link,
        facts: Facts,
        *,
        depth: int = 2,
        parent_alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`depth`: steps that are out at a time, 1 or 2. The loop ends when `parent_alive` says no.
        `clock` is what deadlines are measured by."""
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2, got {depth}")
        self._scheduler = scheduler
        self._executor = executor
        self._link = link
        self._facts = facts
        self._depth = depth
        self._parent_alive = parent_alive
        self._clock = clock
        self._draining = False
        self._ending = False
        self._faults = 0
        self._checked_at = float("-inf")
        self._rate = Rate()
        self._step_seconds = 0.0
        self._collected_at = 0.0

    def run(self) -> None:
        """Serve until told to end, or the parent has. Raises what is a fault of the engine itself,
        after telling the front: what is open may go on in another engine."""
        # What is there now stays: the collector need not look through it during steps.
        gc.collect()
        gc.freeze()
        self._link.send(self._ready())
        try:
            while not self._ending and self._parent_alive():
                self._turn()
        except Exception as error:
            self._link.send(Failed(f"The engine stopped by a fault of its own: {error}."))
            raise

    def _turn(self) -> None:
        """One round: messages in, at most one step submitted, at most one collected."""
        for message in self._link.receive():
            self._take(message)
        if self._ending:
            return
        self._scheduler.expire(self._clock())
        plan = self._scheduler.plan()
        if plan is not None:
            self._submit(plan)
        self._emit()
        out = self._scheduler.outstanding_steps
        if out and (plan is None or out >= self._depth):
            self._collect()
        elif not out and plan is None:
            self._rest()

    def _submit(self, plan: StepPlan) -> None:
        if not self._scheduler.outstanding_steps > 1:
            self._collected_at = time.monotonic()  # the device was idle until now
        try:
            self._executor.submit(plan)
        except Exception as fault:
            self._abandon(plan.step, fault)

    def _collect(self) -> None:
        step = self._scheduler.oldest_step
        try:
            result = self._executor.collect()
        except Exception as fault:
            self._abandon(step, fault)
            return
        now = time.monotonic()
        self._step_seconds, self._collected_at = now - self._collected_at, now
        self._scheduler.commit(result)
        self._faults = 0
        self._rate.add(now, self._scheduler.counters.generated_tokens)

    def _abandon(self, step: int, fault: Exception) -> None:
        """The sequences of this step end with an error; the others go on."""
        log.error("step %d failed", step, exc_info=fault)
        told = str(fault).strip().partition("\n")[0].rstrip(".") or type(fault).__name__
        self._scheduler.abandon(step, f"The model failed while it computed this answer: {told}.")
        self._faults += 1
        if self._faults >= FAULTS_IN_A_ROW:
            message = f"{self._faults} steps in a row failed, the last one with: {told}."
            self._emit()
            raise RuntimeError(message)

    def _emit(self) -> None:
        events = self._scheduler.outbox.take()
        if events is not None:
            self._link.send(events)

    def _rest(self) -> None:
        """Nothing to compute: put things in order, then sleep until a message or a deadline."""
        if self._draining and not self._scheduler.open_sequences:
            self._link.send(Drained())
            self._ending = True
            return
        if time.monotonic() - self._checked_at > CHECK_EVERY:
            self._scheduler.ledger.heal()
            self._checked_at = time.monotonic()
        until_deadline = self._scheduler.next_deadline() - self._clock()
        self._link.wait(min(NAP, max(0.0, until_deadline)))

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                self._admit(requests)
            case Abort(sids):
                self._scheduler.abort(sids)
            case FlushCache():
                stay = self._scheduler.flush_cache()
                told = f"{stay} pages stay: running sequences use them." if stay else ""
                self._link.send(Flushed(told))
            case AskStats():
                self._link.send(self._stats())
            case Drain():
                self._draining = True
            case Shutdown():
                self._scheduler.end_all(Finish(0, "abort"))
                self._emit()
                self._ending = True

    def _admit(self, requests: list[Request]) -> None:
        if not self._draining:
            self._scheduler.submit(requests)
            return
        message = "The server is shutting down and takes no more requests."
        for request in requests:
            finish = Finish(request.sid, "error", message=message, status=503)
            self._scheduler.outbox.finished(finish)

    def _ready(self) -> Ready:
        geometry, facts = self._scheduler.geometry, self._facts
        return Ready(
            num_pages=geometry.num_pages,
            page_size=geometry.page_size,
            max_slots=geometry.max_slots,
            context_length=geometry.context_length,
            vocab_size=geometry.vocab_size,
            kv_bytes_per_token=geometry.kv_bytes_per_token,
            eos_ids=geometry.eos_ids,
            weight_bytes=facts.weight_bytes,
            dtype=facts.dtype,
            device=facts.device,
            backends=dict(facts.backends),
        )

    def _stats(self) -> Stats:
        scheduler = self._scheduler
        pool, counters = scheduler.ledger.pool, scheduler.counters
        return Stats(
            running=len(scheduler.table.sequences),
            waiting=len(scheduler.queue),
            pages_free=pool.free,
            pages_held=pool.held,
            pages_cached=pool.cached,
            pages_total=pool.usable,
            evicted_pages=scheduler.ledger.tree.evicted,
            healed=scheduler.ledger.healed,
            last_step_seconds=self._step_seconds,
            tokens_per_second=self._rate.per_second(time.monotonic()),
            **asdict(counters),
        )
