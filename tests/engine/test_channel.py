"""Messages cross between the two ends as they are."""

import pytest

from detour.engine.channel import (
    Abort,
    AskStats,
    EngineChannel,
    Flushed,
    FrontChannel,
    Stats,
    Submit,
)
from detour.engine.request import Finish, Request, TokenEvents, pack_ids, unpack_ids
from detour.sampling_params import SamplingParams


@pytest.fixture
def addresses(tmp_path):
    return f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"


async def test_both_ways(addresses):
    engine = EngineChannel(*addresses)
    front = FrontChannel(*addresses)
    try:
        request = Request(
            sid=7,
            group=7,
            request_id="r",
            prompt_ids=pack_ids([1, 2, 3]),
            params=SamplingParams(max_tokens=4, logit_bias={3: -1.0}, stop=("x",)),
        )
        for message in (Submit([request]), Abort([7]), AskStats()):
            front.send(message)
        received = []
        while len(received) < 3:
            assert engine.wait(5.0)
            received += engine.receive()
        assert received == [Submit([request]), Abort([7]), AskStats()]
        assert unpack_ids(received[0].requests[0].prompt_ids).tolist() == [1, 2, 3]

        events = TokenEvents(sids=b"", tokens=pack_ids([9]), finished=[Finish(7, "stop", 9)])
        for answer in (events, Stats(running=3), Flushed("no")):
            engine.send(answer)
        assert [await front.receive() for _ in range(3)] == [
            events,
            Stats(running=3),
            Flushed("no"),
        ]
    finally:
        front.close()
        engine.close(0.0)


async def test_a_front_that_has_closed_sends_nothing(addresses):
    """Streams that are cut short by a second Ctrl-C abort their sequences after the close."""
    front = FrontChannel(*addresses)
    front.close()
    front.send(Abort([7]))


def test_receive_does_not_wait(addresses):
    engine = EngineChannel(*addresses)
    assert engine.receive() == []
    assert not engine.wait(0.0)
    engine.close(0.0)


async def test_a_foreign_message_is_dropped(addresses, caplog):
    engine = EngineChannel(*addresses)
    front = FrontChannel(*addresses)
    front.send(Flushed())  # type: ignore[arg-type]
    front.send(AskStats())
    received = []
    while not received:
        assert engine.wait(5.0)
        received += engine.receive()
    assert received == [AskStats()]
    assert "not understood" in caplog.text
    front.close()
    engine.close(0.0)
