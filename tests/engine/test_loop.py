"""The loop between a front that is played by a script and an executor without a model."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_executor import FakeExecutor, geometry, run_alone
from harness import request

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
from detour.engine.loop import EngineLoop, Rate
from detour.engine.request import Finish, TokenEvents, unpack_ids
from detour.engine.scheduler import Scheduler, SchedulerSettings


@dataclass(frozen=True)
class Facts:
    weight_bytes: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    backends: dict[str, str] = field(default_factory=dict)


class Front:
    """Says the next of `script` whenever the engine rests; `hears` may add to `inbox` at once."""

    def __init__(
        self, *script: ToEngine, hears: Callable[["Front", ToFront], None] = lambda *_: None
    ) -> None:
        self.script = deque(script)
        self.inbox: list[ToEngine] = []
        self.hears = hears
        self.heard: list[ToFront] = []
        self.waits: list[float] = []

    def receive(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.inbox.append(self.script.popleft() if self.script else Shutdown())
        return True

    def send(self, message: ToFront) -> None:
        self.heard.append(message)
        self.hears(self, message)

    @property
    def finishes(self) -> list[Finish]:
        return [f for m in self.heard if isinstance(m, TokenEvents) for f in m.finished]

    @property
    def tokens(self) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {}
        for message in self.heard:
            if isinstance(message, TokenEvents):
                sids = np.frombuffer(message.sids, np.int64).tolist()
                for sid, token in zip(sids, unpack_ids(message.tokens).tolist(), strict=True):
                    got.setdefault(sid, []).append(token)
        return got


def loop(front: Front, depth: int = 2, settings=None, clock=lambda: 0.0, **faults) -> EngineLoop:
    executor = FakeExecutor(geometry(), **faults)
    scheduler = Scheduler(executor.geometry, settings or SchedulerSettings())
    return EngineLoop(scheduler, executor, front, Facts(), depth=depth, clock=clock)


def long(sid: int, **changes):
    return request(sid, [5, 6, 7], **{"max_tokens": 20, "ignore_eos": True, **changes})


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_answered(depth):
    requests = [request(n, [n, 2, 3], max_tokens=9) for n in range(1, 30)]
    front = Front(Submit(requests[:20]), Submit(requests[20:]))
    loop(front, depth).run()
    ready = front.heard[0]
    assert isinstance(ready, Ready)
    assert (ready.max_slots, ready.eos_ids, ready.weight_bytes) == (8, (0,), 5)
    for entry in requests:
        assert front.tokens[entry.sid] == run_alone(entry, geometry())[0]
    assert sorted(f.sid for f in front.finishes) == [entry.sid for entry in requests]


def test_rest_is_a_sleep():
    front = Front(Submit([long(1)]))
    loop(front).run()
    assert front.waits == [1.0, 1.0], "before the request and after it, not once in between"


def test_a_deadline_wakes_the_loop():
    now = [10.0]
    front = Front(Submit([long(1, deadline=30.0, max_tokens=100)]), Shutdown())

    def hears(front: Front, message: ToFront) -> None:
        now[0] += 5.0

    front.hears = hears
    loop(front, clock=lambda: now[0]).run()
    assert [f.reason for f in front.finishes] == ["deadline"]
    assert 1 <= len(front.tokens[1]) < 10


def test_abort_is_silent():
    def hears(front: Front, message: ToFront) -> None:
        if isinstance(message, TokenEvents) and 1 in np.frombuffer(message.sids, np.int64):
            front.inbox.append(Abort([1, 99]))

    front = Front(Submit([long(1), long(2)]), hears=hears)
    loop(front).run()
    assert [f.sid for f in front.finishes] == [2]
    assert len(front.tokens[1]) < 4 and len(front.tokens[2]) == 20


def test_drain_finishes_what_is_open_and_takes_no_more():
    def hears(front: Front, message: ToFront) -> None:
        if isinstance(message, TokenEvents) and len(front.heard) == 3:
            front.inbox += [Drain(), Submit([long(2)])]

    front = Front(Submit([long(1)]), hears=hears)
    loop(front).run()
    assert isinstance(front.heard[-1], Drained)
    assert {f.sid: f.status for f in front.finishes} == {1: 200, 2: 503}
    assert len(front.tokens[1]) == 20


def test_shutdown_ends_what_is_open():
    def hears(front: Front, message: ToFront) -> None:
        if isinstance(message, TokenEvents) and not front.finishes:
            front.inbox.append(Shutdown())

    front = Front(Submit([long(n) for n in range(10)]), hears=hears)
    loop(front).run()
    assert [f.reason for f in front.finishes] == ["abort"] * 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", ["raise_on", "refuse"])
def test_a_failed_step_is_told_and_the_next_requests_are_served(depth, fault):
    front = Front(Submit([long(1), long(2)]), Submit([long(3)]))
    loop(front, depth, **{fault: [3]}).run()
    ends = {f.sid: f for f in front.finishes}
    assert [ends[n].status for n in (1, 2, 3)] == [500, 500, 200]
    assert ends[1].message.startswith("The model failed while it computed this answer: step 3")
    assert len(front.tokens[3]) == 20


def test_an_executor_that_always_fails_ends_the_engine():
    front = Front(*(Submit([long(n)]) for n in range(9)), Submit([long(9), long(10)]))
    with pytest.raises(RuntimeError, match="5 steps in a row failed"):
        loop(front, raise_on=range(100)).run()
    assert isinstance(front.heard[-1], Failed)
    assert "5 steps in a row failed" in front.heard[-1].message
    assert [f.status for f in front.finishes] == [500] * 5


def test_a_fault_of_the_engine_itself_is_told(monkeypatch):
    front = Front(Submit([long(1)]))
    engine = loop(front)
    monkeypatch.setattr(engine._scheduler, "commit", lambda result: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert isinstance(front.heard[-1], Failed) and "fault of its own" in front.heard[-1].message


def test_the_loop_ends_with_its_parent():
    front = Front(Submit([long(1)]), AskStats())
    engine = loop(front)
    engine._parent_alive = lambda: len(front.waits) < 2
    engine.run()
    assert len(front.tokens[1]) == 20 and not any(isinstance(m, Stats) for m in front.heard)


def test_stats_and_flush():
    front = Front(Submit([request(1, list(range(1, 20)), max_tokens=3)]), AskStats(), FlushCache())
    loop(front).run()
    stats = next(m for m in front.heard if isinstance(m, Stats))
    assert (stats.running, stats.waiting, stats.pages_held, stats.pages_total) == (0, 0, 0, 63)
    assert stats.pages_free + stats.pages_cached == stats.pages_total and stats.pages_cached >= 4
    assert (stats.prompt_tokens, stats.cached_tokens, stats.healed) == (19, 0, 0)
    assert stats.generated_tokens == len(front.tokens[1]) and stats.steps >= 3
    assert Flushed("") in front.heard


def test_the_rate_is_of_the_last_seconds():
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    for second in range(20):
        rate.add(float(second), second * 10 if second < 10 else 90 + (second - 9) * 100)
    assert rate.per_second(19.0) == 100.0
    assert rate.per_second(100.0) == 0.0


def test_depth_is_one_or_two():
    with pytest.raises(ValueError, match="depth"):
        loop(Front(), depth=3)
