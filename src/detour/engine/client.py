"""The engine as the front sees it: submit, stream, abort, health.

`EngineHandle` is the seam; engine/remote.py implements it for an engine in another process, and
`tests/fake_engine.py` holds one that says scripted tokens.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from detour.engine.channel import Ready, Stats
from detour.engine.request import Finish, Request, Started, TokenLogprobs
from detour.engine.request import PromptLogprobs as PromptLogprobs

EngineState = Literal["starting", "ready", "recovering", "draining", "failed"]


class Listener(Protocol):
    """Gets what the engine says of one sequence, called on the front's event loop, in order.

    Calls are plain functions, not coroutines: a step of a thousand tokens must not wake a thousand
    tasks before the listener decided that there is something to send.
    """

    def on_started(self, started: Started) -> None: ...
    def on_token(self, token: int) -> None: ...
    def on_logprobs(self, logprobs: TokenLogprobs) -> None: ...  # before the on_token it belongs to
    def on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None: ...
    def on_finish(self, finish: Finish) -> None: ...  # exactly once; after it only on_step_end
    def on_step_end(self) -> None: ...  # once per message that held anything for this sequence


class EngineHandle(Protocol):
    """What api/ knows of the engine."""

    @property
    def state(self) -> EngineState: ...

    @property
    def failure(self) -> str:
        """Why state is "failed", one sentence; "" in every other state."""

    @property
    def ready(self) -> Ready:
        """Raises Unavailable before the engine is ready."""

    @property
    def open_sequences(self) -> int: ...

    def new_sids(self, n: int) -> range: ...

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> None:
        """Raises Unavailable (queue full, draining, failed): then nothing was submitted."""

    def abort(self, sids: Sequence[int]) -> None:
        """The listeners of these sequences hear no more (not even a finish)."""

    async def stats(self) -> Stats: ...

    async def flush_cache(self) -> str:
        """ "" when done, else why not all of it."""


Clock = Callable[[], float]
