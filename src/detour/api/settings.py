"""What the HTTP front is told at start: plain values. Knows no flags; launch.py fills it in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from detour.text.reply_parser import ReplySyntax


@dataclass(frozen=True)
class ApiSettings:
    """The engine's own facts (context length, vocabulary) come from `engine.ready` instead."""

    model_path: str  # what the user asked for; accepted as a model name too
    served_model_names: tuple[str, ...] = ()  # empty = the path; replies say the first
    tokenizer_path: str = ""  # "" = the model path
    api_key: str = ""  # "" = open to all
    admin_api_key: str = ""  # "" = control routes take the api_key
    cors_origins: tuple[str, ...] = ()  # empty = no CORS headers; "*" = any
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    max_body_bytes: int = 32 << 20
    default_deadline: float = 0.0  # seconds a request may take; 0 = no limit
    incremental_stream: bool = False  # /generate chunks carry new text instead of all of it
    tokenizer_threads: int = 2
    syntax: ReplySyntax = field(default_factory=ReplySyntax)  # how thoughts and calls are written
    model_config: Mapping[str, Any] = field(default_factory=dict)  # config.json, for /model_info
    server_config: Mapping[str, Any] = field(default_factory=dict)  # every option, for /server_info

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.model_path,)
