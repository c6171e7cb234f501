"""One client request while it runs: its choices, what the engine said of each, and how it ended.

Knows the engine handle and the detokenizer; nothing of HTTP or of any reply's shape.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.types import Receive

from detour.engine.client import EngineHandle
from detour.engine.request import (
    Finish,
    PromptLogprobs,
    Request,
    Started,
    TokenLogprobs,
    unpack_ids,
)
from detour.errors import BadRequest, DeadlineExceeded, DetourError, Unavailable
from detour.metrics import Metrics
from detour.text.detokenizer import Detokenizer

_TYPE_OF_STATUS = {kind.status: kind.type for kind in (BadRequest, Unavailable, DeadlineExceeded)}


class Choice:
    """One sequence's answer as it grows: the Listener that the engine handle speaks to.

    `take_text` and `take_tokens` give what came since they were last called.
    """

    __slots__ = (
        "_detokenizer",
        "_finish",
        "_generation",
        "_logprobs_taken",
        "_read",
        "_tokens_taken",
        "cached_tokens",
        "drops_tokens",
        "finish_reason",
        "index",
        "last_token_at",
        "logprobs",
        "matched_stop",
        "pieces",
        "prompt_index",
        "prompt_logprobs",
        "request",
        "token_ids",
    )

    def __init__(
        self, index: int, prompt_index: int, request: Request, detokenizer: Detokenizer
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index  # of the prompts that the client sent
        self.request = request
        self.cached_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of token_ids, where the request asks for them
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.finish_reason = ""  # "" while it runs, then stop | length | abort | error | deadline
        self.matched_stop: str | int | None = None
        self.last_token_at = 0.0  # time.perf_counter(); 0 before the first
        self.pieces: list[str] = []  # text that take_text has not given yet
        self.drops_tokens = False  # only the prompt counts (max_tokens 0)
        self._detokenizer = detokenizer
        self._generation: Generation | None = None
        self._finish: Finish | None = None
        self._read = 0  # token_ids that were turned into text
        self._tokens_taken = 0
        self._logprobs_taken = 0

    def attach(self, generation: "Generation") -> None:
        self._generation = generation

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = unpack_ids(self.request.prompt_ids).tolist()
        return ids

    def take_text(self) -> str:
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces.pop()
        text = "".join(pieces)
        pieces.clear()
        return text

    def take_tokens(self) -> list[int]:
        fresh = self.token_ids[self._tokens_taken :]
        self._tokens_taken = len(self.token_ids)
        return fresh

    def take_logprobs(self) -> list[TokenLogprobs]:
        """In step with take_tokens where both are called together."""
        fresh = self.logprobs[self._logprobs_taken :]
        self._logprobs_taken = len(self.logprobs)
        return fresh

    # --- Listener

    def on_started(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens

    def on_token(self, token: int) -> None:
        self.token_ids.append(token)

    def on_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.logprobs.append(logprobs)

    def on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        self.prompt_logprobs.append(logprobs)

    def on_finish(self, finish: Finish) -> None:
        self._finish = finish

    def on_step_end(self) -> None:
        if self.finish_reason:
            return
        generation = self._generation
        assert generation is not None, "a choice hears of its tokens only after it was submitted"
        if len(self.token_ids) > self._read:
            self._read_tokens(generation)
        finish = self._finish
        if finish is not None and not self.finish_reason:
            if finish.matched >= 0:
                self.matched_stop = finish.matched
            self._end(finish.reason)
        if self.finish_reason:
            generation.ended(self)
        else:
            generation.on_change()

    def end_here(self, reason: str) -> None:
        """End it from the front's side; the engine is told by the caller."""
        if not self.finish_reason:
            self._end(reason)

    def _read_tokens(self, generation: "Generation") -> None:
        """Turn the step's tokens into text, up to a stop string or the token that ended it."""
        tokens = self.token_ids
        if self.drops_tokens:
            tokens.clear()
            self.logprobs.clear()
            return
        generation.time_tokens(self, len(tokens) - self._read)
        shown = len(tokens)
        if self._finish is not None and self._hides_last(tokens[-1]):
            shown -= 1  # a stop token is counted, not shown
        detokenizer = self._detokenizer
        for place in range(self._read, shown):
            text = detokenizer.push(tokens[place])
            if text:
                self.pieces.append(text)
            if detokenizer.stopped:
                del tokens[place + 1 :]
                self.matched_stop = detokenizer.stopped
                generation.stop_in_engine(self)
                self._end("stop")
                break
        self._read = len(tokens)

    def _hides_last(self, token: int) -> bool:
        finish = self._finish
        if finish is None or token != finish.matched:
            return False
        return not self.request.params.include_stop_str_in_output

    def _end(self, reason: str) -> None:
        if not self._detokenizer.stopped:
            rest = self._detokenizer.finish()
            if rest:
                self.pieces.append(rest)
        if self.request.params.logprobs >= 0:
            del self.logprobs[len(self.token_ids) :]
        self.finish_reason = reason

    def failure(self, seconds: float) -> DetourError:
        """What the client is told when it ended with "error" or "deadline"."""
        if self.finish_reason == "deadline":
            return DeadlineExceeded(
                f"The request's time ran out after {seconds:.1f} s and "
                f"{len(self.token_ids)} tokens.",
                param="timeout",
            )
        assert self._finish is not None, "only the engine ends a sequence with an error"
        error = Unavailable(self._finish.message)
        error.status = self._finish.status if self._finish.status >= 400 else 500
        error.type = _TYPE_OF_STATUS.get(error.status, DetourError.type)
        return error


class Generation:
    """The choices of one client request. `on_change` is called when there may be news."""

    __slots__ = (
        "_arrived",
        "_engine",
        "_metrics",
        "_open",
        "choices",
        "created",
        "failure",
        "finished",
        "on_change",
        "on_end",
        "request_id",
    )

    def __init__(
        self,
        engine: EngineHandle,
        metrics: Metrics,
        request_id: str,
        choices: Sequence[Choice],
        arrived: float,
    ) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.choices = choices
        self.failure: DetourError | None = None
        self.on_change: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self._engine = engine
        self._metrics = metrics
        self._arrived = arrived  # time.perf_counter()
        self._open = len(choices)
        self.finished = False  # all choices ended, or one failed
        for choice in choices:
            choice.attach(self)

    def submit(self) -> None:
        """Raises Unavailable when the engine takes no more."""
        self._engine.submit([choice.request for choice in self.choices], self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, however many choices it has."""
        prompts = {choice.prompt_index: choice.request for choice in self.choices}
        return sum(len(request.prompt_ids) // 4 for request in prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Of each prompt once: what its first choice found in the cache."""
        first: dict[int, int] = {}
        for choice in self.choices:
            first.setdefault(choice.prompt_index, choice.cached_tokens)
        return sum(first.values())

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._arrived

    def ended(self, choice: Choice) -> None:
        """A choice has its finish reason."""
        self._account(choice)
        self.on_change()
        if self.finished:
            self._over()

    def stop_in_engine(self, choice: Choice) -> None:
        self._engine.abort([choice.request.sid])

    def time_tokens(self, choice: Choice, count: int) -> None:
        metrics = self._metrics
        metrics.generation_tokens += count
        now = time.perf_counter()
        last, choice.last_token_at = choice.last_token_at, now
        if last:
            metrics.inter_token.observe(now - last if count == 1 else (now - last) / count, count)
            return
        metrics.ttft.observe(now - self._arrived)
        if count > 1:
            metrics.inter_token.observe(0.0, count - 1)

    def abandon(self) -> None:
        """The client is gone: nothing more is wanted."""
        self._end_open("abort")
        self._over()

    def cancel(self) -> None:
        """Someone asked to end it; the client gets what there is, with reason "abort"."""
        self._end_open("abort")
        self.on_change()
        self._over()

    async def wait(self, receive: Receive) -> bool:
        """Until all choices ended (true) or the client is gone (false; it is then abandoned).

        Raises `failure`.
        """
        done = asyncio.get_running_loop().create_future()

        def look() -> None:
            if self.finished and not done.done():
                done.set_result(None)

        self.on_change = look
        look()
        watcher = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((done, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not self.finished:
                self.abandon()
        if not done.done():
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def _account(self, choice: Choice) -> None:
        self._open -= 1
        self.finished = self.finished or self._open == 0
        self._metrics.sequence_finished(
            choice.finish_reason,
            len(choice.request.prompt_ids) // 4,
            choice.cached_tokens,
            len(choice.token_ids),
            self.seconds,
        )
        if choice.finish_reason in ("error", "deadline") and self.failure is None:
            self.failure = choice.failure(self.seconds)
            self.finished = True
            self._end_open("abort")

    def _end_open(self, reason: str) -> None:
        still = [choice for choice in self.choices if not choice.finish_reason]
        self._engine.abort([choice.request.sid for choice in still])
        for choice in still:
            choice.end_here(reason)
            self._account(choice)

    def _over(self) -> None:
        self.on_end()
        self.on_end = _nothing


def _nothing() -> None:
    pass


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
