"""A scripted engine handle and a byte tokenizer: all that tests of the front need of the rest."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from detour.engine.channel import Ready, Stats
from detour.engine.client import EngineState, Listener
from detour.engine.request import (
    Finish,
    PromptLogprobs,
    Request,
    Started,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from detour.errors import BadRequest, Unavailable

BOS, EOS = 256, 257


class ByteTokenizer:
    """A token is a byte; two special tokens follow. Encoding is exact both ways."""

    vocab_size = 258
    eos_ids = (EOS,)
    bos_id = BOS
    special_ids = frozenset((BOS, EOS))
    strips_first_space = False
    chat_template = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return ([BOS] if add_special_tokens else []) + list(text.encode())
        except UnicodeEncodeError as error:
            raise BadRequest("The text is not valid Unicode.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (one for one in ids if not (skip_special_tokens and one in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else {BOS: b"<bos>", EOS: b"<eos>"}[token]

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, text: str) -> int:
        return {"<bos>": BOS, "<eos>": EOS}.get(text, -1)

    def pieces(self, skip_special_tokens: bool) -> list[bytes]:
        """By token: its bytes."""
        specials = [b"", b""] if skip_special_tokens else [b"<bos>", b"<eos>"]
        return [bytes([one]) for one in range(256)] + specials

    def texts(self, skip_special_tokens: bool) -> list[str | None]:
        """By token: its text, None for a part of a character."""
        specials = ["", ""] if skip_special_tokens else ["<bos>", "<eos>"]
        return [chr(one) if one < 128 else None for one in range(256)] + specials


Script = Callable[[Request, int], int]  # (request, how many it has generated) -> next token


def says(text: str) -> Script:
    """Every sequence gets the text's bytes, then the end-of-text token, for ever."""
    data = text.encode()

    def script(request: Request, generated: int) -> int:
        return data[generated] if generated < len(data) else EOS

    return script


def logprob_of(token: int) -> float:
    """What the fakes say of any token: exact in float32."""
    return -(token % 8) / 8


class _Running:
    def __init__(self, request: Request, listener: Listener) -> None:
        self.request = request
        self.listener = listener
        self.generated = 0


class FakeEngine:
    """An EngineHandle whose sequences say what a script says.

    It steps by itself on the event loop while something is open (`auto`), or by `step()`. What it
    was given stays in `requests`, what was aborted in `aborted`.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        auto: bool = True,
        context_length: int = 2048,
        capacity: int = 4096,
    ) -> None:
        self.script = script or says("Hello!")
        self.auto = auto
        self.capacity = capacity  # sequences; more are refused
        self.cached_tokens = 0  # what every sequence finds in the cache
        self.requests: list[Request] = []
        self.aborted: list[int] = []
        self.flushes = 0
        self.finish: Finish | None = None  # every sequence ends with it at its next step
        self.state: EngineState = "ready"
        self.failure = ""  # why state is "failed"
        self._ready = Ready(
            num_pages=257,
            page_size=16,
            max_slots=capacity,
            context_length=context_length,
            vocab_size=ByteTokenizer.vocab_size + 62,  # padded, as models are
            kv_bytes_per_token=1,
            eos_ids=(EOS,),
            weight_bytes=1,
            dtype="float32",
            device="fake",
            backends={},
        )
        self._open: dict[int, _Running] = {}
        self._next_sid = 1
        self._generated = 0

    @property
    def ready(self) -> Ready:
        if self.state == "starting":
            raise Unavailable("The engine is starting; try again soon.")
        return self._ready

    @property
    def open_sequences(self) -> int:
        return len(self._open)

    def new_sids(self, n: int) -> range:
        self._next_sid += n
        return range(self._next_sid - n, self._next_sid)

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> None:
        if self.state != "ready":
            raise Unavailable(f"The engine is {self.state}.")
        if len(self._open) + len(requests) > self.capacity:
            raise Unavailable("The queue is full.", code="queue_full")
        self.requests += requests
        was_idle = not self._open
        for request, listener in zip(requests, listeners, strict=True):
            self._open[request.sid] = _Running(request, listener)
        if self.auto and was_idle:
            asyncio.get_running_loop().call_soon(self._run)

    def abort(self, sids: Iterable[int]) -> None:
        for sid in sids:
            if self._open.pop(sid, None) is not None:
                self.aborted.append(sid)

    async def stats(self) -> Stats:
        return Stats(running=len(self._open), generated_tokens=self._generated, pages_total=256)

    async def flush_cache(self) -> str:
        self.flushes += 1
        return ""

    def step(self) -> None:
        """One token for every open sequence."""
        for running in list(self._open.values()):
            if running.request.sid in self._open:  # else aborted by another one's listener
                self._advance(running)
                running.listener.on_step_end()

    def _run(self) -> None:
        self.step()
        if self._open and self.auto:
            asyncio.get_running_loop().call_soon(self._run)

    def _advance(self, running: _Running) -> None:
        request, listener = running.request, running.listener
        sid, params = request.sid, request.params
        if self.finish is not None:
            failure = self.finish
            self._finish(running, Finish(sid, failure.reason, -1, failure.message, failure.status))
            return
        token = self.script(request, running.generated)
        if running.generated == 0:
            listener.on_started(Started(sid, self.cached_tokens))
            if params.prompt_logprobs >= 0:
                listener.on_prompt_logprobs(_prompt_logprobs(request))
        if params.logprobs >= 0:
            tops = [token, *range(params.logprobs)][: params.logprobs]
            listener.on_logprobs(
                TokenLogprobs(sid, logprob_of(token), pack_ids(tops), _packed_logprobs(tops))
            )
        running.generated += 1
        self._generated += 1
        listener.on_token(token)
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if ends and running.generated > params.min_tokens:
            self._finish(running, Finish(sid, "stop", token))
        elif running.generated >= params.max_tokens:
            self._finish(running, Finish(sid, "length"))

    def _finish(self, running: _Running, finish: Finish) -> None:
        del self._open[finish.sid]
        running.listener.on_finish(finish)


def _packed_logprobs(tokens: Iterable[int]) -> bytes:
    return np.array([logprob_of(token) for token in tokens], dtype=np.float32).tobytes()


def _prompt_logprobs(request: Request) -> PromptLogprobs:
    ids = unpack_ids(request.prompt_ids).tolist()[1:]
    k = request.params.prompt_logprobs
    tops = [top for token in ids for top in [token, *range(k)][:k]]
    return PromptLogprobs(
        request.sid, 1, _packed_logprobs(ids), pack_ids(tops), _packed_logprobs(tops)
    )
