"""Typed messages between the front and the engine process, msgpack over zmq ipc.

Both directions are one-way streams (PUSH/PULL); an answer carries no id because each kind of question
is asked by one place at a time.
"""

import msgspec

from detour.engine.request import Request, TokenEvents

# --- front to engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client of these sequences is gone, or a stop string ended them. Unknown sids are ignored."""

    sids: list[int]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes that no running sequence uses. Answered with Flushed."""


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Answered with Stats."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what was submitted, then answer Drained and end the process."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now; open sequences get a Finish with reason "abort"."""


ToEngine = Submit | Abort | FlushCache | AskStats | Drain | Shutdown

# --- engine to front


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. Geometry as in engine.plan, and what people ask about a server."""

    num_pages: int
    page_size: int
    max_slots: int
    context_length: int
    vocab_size: int
    kv_bytes_per_token: int
    eos_ids: tuple[int, ...]
    weight_bytes: int
    dtype: str
    device: str
    backends: dict[str, str]  # op -> backend in use


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A snapshot of the engine; counters count from its start."""

    running: int = 0  # sequences in a slot
    waiting: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed, so without cached ones
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    healed: int = 0  # page-pool equation violations found and repaired
    last_step_seconds: float = 0.0
    tokens_per_second: float = 0.0  # generated, over the last seconds


class Flushed(msgspec.Struct, frozen=True, tag=True):
    message: str = ""  # "" = done; else why not all of it


class Drained(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; one sentence."""

    message: str


ToFront = Ready | TokenEvents | Stats | Flushed | Drained | Failed
