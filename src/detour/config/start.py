"""What the front tells the engine process at its start, and how it crosses.

The message is one JSON document on the process's standard input. The front keeps that pipe open for
as long as it lives: its end tells the engine that the front is gone.
"""

import msgspec

from detour.config.options import Config


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """A Config with what the front has found out."""

    config: Config
    model_path: str  # a folder or .gguf file on this disk
    seed: int  # of dummy weights
    to_engine: str  # zmq address the engine reads
    to_front: str  # zmq address the engine writes


def pack_start(start: EngineStart) -> bytes:
    """One line."""
    return msgspec.json.encode(start) + b"\n"


def unpack_start(line: bytes) -> EngineStart:
    """Raises msgspec.ValidationError."""
    return msgspec.json.decode(line, type=EngineStart)
