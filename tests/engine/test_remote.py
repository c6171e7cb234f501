"""EngineClient over a link in the test's hand: order, ends, questions, a full queue, a dead engine."""

import asyncio

import numpy as np
import pytest

from detour.engine.channel import (
    Abort,
    AskStats,
    Drain,
    Drained,
    Failed,
    FlushCache,
    Flushed,
    Ready,
    Stats,
    Submit,
)
from detour.engine.remote import EngineClient
from detour.engine.request import (
    Finish,
    PromptLogprobs,
    Request,
    Started,
    TokenEvents,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from detour.errors import Unavailable
from detour.sampling_params import SamplingParams

READY = Ready(
    num_pages=9,
    page_size=4,
    max_slots=2,
    context_length=32,
    vocab_size=100,
    kv_bytes_per_token=1,
    eos_ids=(0,),
    weight_bytes=1,
    dtype="float32",
    device="none",
    backends={},
)


class Link:
    def __init__(self):
        self.sent = []
        self.inbox = asyncio.Queue()

    def send(self, message):
        self.sent.append(message)

    async def receive(self):
        return await self.inbox.get()


class Recorder:
    """A listener that writes down what it hears."""

    def __init__(self):
        self.heard = []

    def on_started(self, started):
        self.heard.append(("started", started.cached_tokens))

    def on_token(self, token):
        self.heard.append(token)

    def on_logprobs(self, logprobs):
        self.heard.append(("logprob", logprobs.logprob))

    def on_prompt_logprobs(self, logprobs):
        self.heard.append(("prompt", logprobs.start))

    def on_finish(self, finish):
        self.heard.append(("finish", finish.reason))

    def on_step_end(self):
        self.heard.append("end")


class Rig:
    """A client that is ready and receives."""

    def __init__(self, max_queued=10, journal_bytes=1 << 20):
        self.link = Link()
        self.client = EngineClient(self.link, max_queued, journal_bytes)
        self.task = asyncio.create_task(self.client.run())

    async def say(self, *messages):
        for message in messages:
            self.link.inbox.put_nowait(message)
        while not self.link.inbox.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def open(self, n=1, **params):
        listeners = [Recorder() for _ in range(n)]
        sids = self.client.new_sids(n)
        requests = [
            Request(
                sid=sid,
                group=sids[0],
                request_id="r",
                prompt_ids=pack_ids([1, 2]),
                params=SamplingParams(**params),
            )
            for sid in sids
        ]
        self.client.submit(requests, listeners)
        return list(sids), listeners


@pytest.fixture
async def rig():
    rig = Rig()
    await rig.say(READY)
    yield rig
    rig.task.cancel()


def events(sids, tokens, **more):
    return TokenEvents(np.array(sids, dtype=np.int64).tobytes(), pack_ids(tokens), **more)


async def test_starting_then_ready():
    rig = Rig()
    assert rig.client.state == "starting"
    with pytest.raises(Unavailable, match="starting"):
        _ = rig.client.ready
    with pytest.raises(Unavailable, match="starting"):
        rig.open()
    up = asyncio.create_task(rig.client.wait_until_up())
    await rig.say(READY)
    await up
    assert rig.client.state == "ready" and rig.client.ready == READY
    rig.task.cancel()


async def test_everything_of_a_step_arrives_in_order(rig):
    (sid,), (listener,) = rig.open()
    await rig.say(
        events(
            [sid],
            [7],
            started=[Started(sid, 3)],
            prompt_logprobs=[PromptLogprobs(sid, 1, b"", b"", b"")],
            logprobs=[TokenLogprobs(sid, -1.0, b"", b"")],
        ),
        events([sid], [8]),
        events([sid], [9], finished=[Finish(sid, "stop", 9)]),
        events([sid], [10]),
    )
    first = [("started", 3), ("prompt", 1), ("logprob", -1.0), 7, "end"]
    assert listener.heard == [*first, 8, "end", 9, ("finish", "stop"), "end"]
    assert rig.client.open_sequences == 0


async def test_several_tokens_of_a_sequence_in_one_step(rig):
    (one, two), (a, b) = rig.open(2)
    started = [Started(one, 0)]
    await rig.say(events([one, two, one], [1, 2, 3], started=started), events([two, two], [4, 5]))
    assert a.heard == [("started", 0), 1, 3, "end"]
    assert [heard for heard in b.heard if heard != "end"] == [2, 4, 5]


async def test_aborted_sequences_hear_no_more(rig):
    (one, two), (a, b) = rig.open(2)
    rig.client.abort([one, 999])
    assert rig.link.sent[-1] == Abort([one])
    await rig.say(events([one, two], [1, 2], finished=[Finish(one, "abort")]))
    assert a.heard == [] and b.heard == [2, "end"]
    assert rig.client.open_sequences == 1
    rig.client.abort([one])
    assert rig.link.sent[-1] == Abort([one]) and len(rig.link.sent) == 2  # nothing more was sent


async def test_abort_from_within_a_listener(rig):
    (one, two), (a, b) = rig.open(2)
    a.on_step_end = lambda: rig.client.abort([one, two])
    await rig.say(events([one, two], [1, 2]), events([one, two], [3, 4]))
    assert a.heard == [1] and b.heard == []
    await rig.say(events([one], [5], finished=[Finish(one, "stop")]))
    assert rig.client.open_sequences == 0


async def test_fault_in_a_listener_ends_its_sequence_alone(rig, caplog):
    (one, two), (a, b) = rig.open(2)

    def fault():
        raise ValueError("a fault of ours")

    a.on_step_end = fault
    await rig.say(events([one, two], [1, 2]), events([one, two], [3, 4]))
    assert b.heard == [2, "end", 4, "end"] and rig.link.sent[-1] == Abort([one])
    assert "its listener failed" in caplog.text


async def test_queue_limit_counts_running_and_waiting():
    rig = Rig(max_queued=1)
    await rig.say(READY)  # 2 slots
    (first, *_), _ = rig.open(3)
    with pytest.raises(Unavailable, match="queue is full"):
        rig.open()
    rig.client.abort([first])
    with pytest.raises(Unavailable, match="queue is full"):
        rig.open(2)
    rig.open(1)
    assert rig.client.open_sequences == 3
    assert sum(isinstance(message, Submit) for message in rig.link.sent) == 2
    rig.task.cancel()


async def test_questions_are_shared_while_they_are_out(rig):
    asks = [asyncio.create_task(rig.client.stats()) for _ in range(3)]
    flush = asyncio.create_task(rig.client.flush_cache())
    await asyncio.sleep(0)
    assert rig.link.sent == [AskStats(), FlushCache()]
    await rig.say(Stats(running=4), Flushed("2 pages are in use"))
    assert [(await ask).running for ask in asks] == [4, 4, 4]
    assert await flush == "2 pages are in use"
    again = asyncio.create_task(rig.client.stats())
    await asyncio.sleep(0)
    assert rig.link.sent[-1] == AskStats()
    again.cancel()


async def test_dead_engine_ends_everything_with_a_sentence(rig):
    (sid,), (listener,) = rig.open()
    question = asyncio.create_task(rig.client.stats())
    await asyncio.sleep(0)
    await rig.say(Failed("It ran out of memory."))
    assert rig.client.state == "ready" and rig.client.last_words == "It ran out of memory."
    rig.client.fail("The engine ran out of memory.")
    assert listener.heard == [("finish", "error"), "end"]
    assert rig.client.state == "failed" and rig.client.open_sequences == 0
    for refused in (question, rig.client.stats(), rig.client.flush_cache()):
        with pytest.raises(Unavailable, match="out of memory"):
            await refused
    with pytest.raises(Unavailable, match="out of memory"):
        rig.open()


async def test_an_engine_that_refuses_to_start_fails_at_once():
    rig = Rig()
    await rig.say(Failed("There is no such model."))
    assert rig.client.state == "failed" and rig.client.failure == "There is no such model."
    rig.task.cancel()


class Renewed:
    """A rig whose engine was lost, and the link to the next one."""

    def __init__(self, rig):
        self.rig = rig
        self.link = Link()

    async def come(self):
        self.rig.task.cancel()
        self.rig.link = self.link
        self.rig.client.renew(self.link)
        self.rig.task = asyncio.create_task(self.rig.client.run())
        await self.rig.say(READY)


async def test_open_sequences_go_on_in_another_engine(rig):
    (one, two), (a, b) = rig.open(2, max_tokens=9)
    await rig.say(events([one, two], [7, 8], started=[Started(one, 3)]), events([one], [9]))
    renewed = Renewed(rig)
    rig.client.lose()
    assert rig.client.state == "recovering"
    (three,), (c,) = rig.open()  # what comes meanwhile waits with the others
    (four,), (d,) = rig.open()
    rig.client.abort([four])
    with pytest.raises(Unavailable, match="started again"):
        await rig.client.stats()
    await renewed.come()
    (told,) = renewed.link.sent
    assert rig.client.state == "ready"
    assert [request.sid for request in told.requests] == [one, two, three]
    outputs = [unpack_ids(request.output_ids).tolist() for request in told.requests]
    assert outputs == [[7, 9], [8], []]
    again = [Started(one, 5), Started(two, 5), Started(three, 0)]
    await rig.say(events([one, two, three], [1, 2, 3], started=again))
    assert a.heard == [("started", 3), 7, "end", 9, "end", 1, "end"]
    assert b.heard == [8, "end", ("started", 5), 2, "end"]
    assert c.heard == [("started", 0), 3, "end"] and d.heard == []
    assert rig.client.tokens == 6


async def test_prompt_logprobs_are_not_said_twice(rig):
    def scores(start, count):
        values = np.arange(start, start + count, dtype=np.float32)
        return PromptLogprobs(sid, start, values.tobytes(), pack_ids([start] * count * 2), b"")

    (sid,), (listener,) = rig.open(prompt_logprobs=2)
    heard = []
    listener.on_prompt_logprobs = heard.append
    await rig.say(events([], [], prompt_logprobs=[scores(0, 4)]))
    renewed = Renewed(rig)
    rig.client.lose()
    await renewed.come()
    await rig.say(events([], [], prompt_logprobs=[scores(0, 3)]))
    await rig.say(events([], [], prompt_logprobs=[scores(3, 5)]))
    assert [part.start for part in heard] == [0, 4]
    assert np.frombuffer(heard[1].logprobs, np.float32).tolist() == [4, 5, 6, 7]
    assert len(unpack_ids(heard[1].top_ids)) == 8


async def test_a_drain_outlives_its_engine(rig):
    (sid,), (listener,) = rig.open()
    draining = asyncio.create_task(rig.client.drain())
    await asyncio.sleep(0)
    renewed = Renewed(rig)
    rig.client.lose()
    assert rig.client.state == "draining"
    await renewed.come()
    assert [type(message) for message in renewed.link.sent] == [Submit, Drain]
    await rig.say(events([sid], [5], finished=[Finish(sid, "length")]), Drained())
    await draining


async def test_an_engine_is_asked_for_a_sign_while_requests_are_open(rig, monkeypatch):
    now = 100.0
    monkeypatch.setattr("detour.engine.remote.time.monotonic", lambda: now)
    assert rig.client.ask_alive() == 0.0 and rig.link.sent == []
    (sid,), _ = rig.open()
    assert rig.client.ask_alive() == 0.0 and rig.link.sent[-1] == AskStats()
    now += 5
    assert rig.client.ask_alive() == 5.0 and len(rig.link.sent) == 2
    await rig.say(events([sid], [1]))  # any message is a sign
    assert rig.client.ask_alive() == 0.0 and len(rig.link.sent) == 3
    rig.client.lose()
    now += 5
    assert rig.client.ask_alive() == 0.0 and len(rig.link.sent) == 3


async def test_a_drain_with_nothing_open_needs_no_other_engine(rig):
    draining = asyncio.create_task(rig.client.drain())
    await asyncio.sleep(0)
    rig.client.lose()
    await draining


async def test_drain_lets_open_sequences_finish(rig):
    (sid,), (listener,) = rig.open()
    draining = asyncio.create_task(rig.client.drain())
    await asyncio.sleep(0)
    assert rig.link.sent[-1] == Drain() and rig.client.state == "draining"
    with pytest.raises(Unavailable, match="shutting down"):
        rig.open()
    await rig.say(events([sid], [5], finished=[Finish(sid, "length")]))
    assert not draining.done() and listener.heard[-1] == "end"
    await rig.say(Drained())
    await draining


async def test_journal_holds_what_a_new_engine_needs(rig):
    (one, two), _ = rig.open(2, max_tokens=5)
    await rig.say(events([one, two], [7, 8]), events([one], [9]))
    left = rig.client.continuations()
    assert [request.sid for request in left] == [one, two]
    assert unpack_ids(left[0].output_ids).tolist() == [7, 9]
    assert unpack_ids(left[1].output_ids).tolist() == [8]
    await rig.say(events([one], [1], finished=[Finish(one, "stop")]))
    rig.client.abort([two])
    assert rig.client.continuations() == []


async def test_journal_is_bounded_and_gives_all_back():
    rig = Rig(journal_bytes=5000)
    await rig.say(READY)
    sids, _ = rig.open(4, max_tokens=5)
    with pytest.raises(Unavailable, match="MiB"):
        rig.open(1, max_tokens=5)
    assert rig.client.open_sequences == 4
    rig.client.abort(sids)
    for _ in range(3):
        sids, _ = rig.open(4, max_tokens=5)
        await rig.say(events([], [], finished=[Finish(sid, "stop") for sid in sids]))
    assert rig.client.open_sequences == 0
    rig.task.cancel()
