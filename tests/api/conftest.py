"""One server per test module, with a scripted engine behind it."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from loopback import Server, serve


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    yield from serve(FakeEngine())


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The module's server with its engine as new."""
    engine = shared_server.engine
    fresh = FakeEngine()

    def renew() -> None:
        assert engine.open_sequences == 0, "an earlier test left sequences open"
        for name in ("script", "auto", "capacity", "cached_tokens", "finish", "failure", "state"):
            setattr(engine, name, getattr(fresh, name))
        engine.requests, engine.aborted = [], []

    shared_server.on_loop(renew)
    return shared_server
