"""Log-probabilities in the shapes that the routes reply with: pure functions of what came back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detour.engine.request import PromptLogprobs, TokenLogprobs, unpack_ids
from detour.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scored:
    """One token, its log-probability (None: first of a prompt) and the likeliest in its place."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)  # best first


def scored_output(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Scored]:
    return [
        Scored(token, one.logprob, _pairs(unpack_ids(one.top_ids), _floats(one.top_logprobs)))
        for token, one in zip(tokens, logprobs, strict=False)
    ]


def scored_prompt(tokens: Sequence[int], parts: Iterable[PromptLogprobs]) -> list[Scored]:
    """One for each prompt token; those that no part covers (the first) have no logprob."""
    result = [Scored(token, None) for token in tokens]
    for part in parts:
        logprobs = _floats(part.logprobs)
        ids = unpack_ids(part.top_ids).reshape(len(logprobs), -1)
        tops = _floats(part.top_logprobs).reshape(len(logprobs), -1)
        for row, logprob in enumerate(logprobs.tolist()):
            place = part.start + row
            result[place] = Scored(tokens[place], logprob, _pairs(ids[row], tops[row]))
    return result


def chat_logprobs(tokenizer: Tokenizer, scored: Iterable[Scored]) -> dict[str, Any]:
    """OpenAI's chat shape, with the bytes of every token."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {
            "token": token_string(raw),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }

    return {
        "content": [
            entry(one.token, one.logprob)
            | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
            for one in scored
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, scored: Iterable[Scored], with_top: bool, offset: int = 0
) -> dict[str, Any]:
    """OpenAI's completions shape. `offset` is the text offset of the first token.

    A place without log-probability has null in token_logprobs and top_logprobs.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float | None] | None] = []
    for one in scored:
        raw = tokenizer.token_bytes(one.token)
        tokens.append(token_string(raw))
        logprobs.append(_finite(one.logprob))
        offsets.append(offset)
        offset += len(raw.decode("utf-8", "ignore"))
        if one.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float | None] = {}
        for token, logprob in one.top:
            top.setdefault(token_string(tokenizer.token_bytes(token)), _finite(logprob))
        top.setdefault(tokens[-1], logprobs[-1])
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops if with_top else None,
        "text_offset": offsets,
    }


def native_logprobs(
    tokenizer: Tokenizer, scored: Iterable[Scored], with_text: bool
) -> tuple[list[Any], list[Any]]:
    """SGLang's shape: [logprob, token id, text or null] for each token, lists of it for the top."""

    def entry(token: int, logprob: float | None) -> list[Any]:
        text = token_string(tokenizer.token_bytes(token)) if with_text else None
        return [_finite(logprob), token, text]

    rows = list(scored)
    own = [entry(one.token, one.logprob) for one in rows]
    tops = [[entry(token, logprob) for token, logprob in one.top] or None for one in rows]
    return own, tops


def token_string(raw: bytes) -> str:
    """A token's text; part of a character is shown as OpenAI shows it: bytes:\\xe2\\x80."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _pairs(ids: Any, logprobs: Any) -> list[tuple[int, float]]:
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _floats(packed: bytes) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return np.frombuffer(packed, dtype=np.float32)


def _finite(logprob: float | None) -> float | None:
    """JSON has no -inf; OpenAI writes -9999 for a token that cannot come."""
    return None if logprob is None else max(logprob, -9999.0)
