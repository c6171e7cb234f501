"""A model in this process, for scripts: prompts in, texts out, no HTTP and no second process.

The same scheduler and executor that serve, stepped by the call that waits for the answer. One
thread at a time may use an LLM.
"""

import difflib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import numpy as np

from detour.config.environment import read_environment
from detour.config.options import OPTIONS, Config
from detour.engine.executor import Executor
from detour.engine.request import Finish, FinishReason, Request, TokenEvents, pack_ids, unpack_ids
from detour.engine.scheduler import Scheduler
from detour.errors import BadRequest, ConfigError
from detour.launch import Model, open_model
from detour.launch_engine import build
from detour.sampling_params import SamplingParams
from detour.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

STEPS_OUT = 2  # the next step is planned while one computes


@dataclass
class Output:
    """What became of one prompt. `text` and `token_ids` grow until `finish_reason` is set."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, where params ask
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that ended it
    error: str = ""  # one sentence where finish_reason is "error"


class LLM:
    """`LLM(model, **options)`; options are the fields of Config (max_running_requests=8, ...).

    Raises ConfigError and CheckpointError, one sentence, where the model cannot be served so.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        config = config_of(model, options)
        environment = read_environment()
        self._model: Model = open_model(config, environment)
        seed = config.random_seed if config.random_seed >= 0 else 0
        executor, scheduler = build(config, self._model.path, seed)
        self._executor: Executor = executor
        self._scheduler: Scheduler = scheduler
        self._open: dict[int, _Open] = {}
        self._next_sid = 1

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        on_finish: Callable[[Output], None] = lambda output: None,
    ) -> list[Output]:
        """Continue each prompt (a text or token ids); outputs stand in the order of the prompts.

        params: for all; None = the model's own defaults. Seed 0 draws one for each prompt.
        on_finish: called as each prompt ends, for progress.
        Raises BadRequest for a prompt or params that cannot be served; then nothing has run.
        """
        ids = [self._encode(prompt) for prompt in _several(prompts)]
        return self._finish_all([self._request(one, params) for one in ids], on_finish)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Output:
        """The model's answer to a conversation ({"role": ..., "content": ...}, ...)."""
        return self.chat_all([messages], params)[0]

    def chat_all(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        on_finish: Callable[[Output], None] = lambda output: None,
    ) -> list[Output]:
        """As chat, for many conversations at once."""
        requests = [self._chat_request(messages, params) for messages in conversations]
        return self._finish_all(requests, on_finish)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """The answer in pieces, as they come. Closing the iterator ends the sequence."""
        request = self._chat_request(messages, params)
        output = self._submit([request])[0]
        shown = 0
        try:
            while output.finish_reason is None:
                self._step()
                if len(output.text) > shown:
                    yield output.text[shown:]
                    shown = len(output.text)
            if output.error:
                raise BadRequest(output.error)
        finally:
            self._abort([request.sid])

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- from prompts to requests

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt)
        return list(prompt)

    def _chat_request(self, messages: Sequence[Message], params: SamplingParams | None) -> Request:
        text = self._model.template.render([dict(m) for m in messages], [], True, False, {})
        ids = self._model.tokenizer.encode(text, add_special_tokens=False)
        room = self._scheduler.geometry.context_length - len(ids)
        return self._request(ids, params or self._defaults(max(room, 1)))

    def _defaults(self, max_tokens: int) -> SamplingParams:
        values = {"max_tokens": max_tokens, **self._model.settings.generation_defaults}
        return SamplingParams(**{k: v for k, v in values.items() if k in _PARAMS})

    def _request(self, ids: list[int], params: SamplingParams | None) -> Request:
        params = params or self._defaults(SamplingParams().max_tokens)
        geometry = self._scheduler.geometry
        params.check(geometry.vocab_size)
        if not ids:
            raise BadRequest("A prompt has no tokens.")
        if len(ids) >= geometry.context_length:
            raise BadRequest(
                f"A prompt has {len(ids)} tokens, but the context holds {geometry.context_length} "
                "with the answer."
            )
        if not all(0 <= token < geometry.vocab_size for token in ids):
            raise BadRequest(f"Token ids must be below the vocabulary size {geometry.vocab_size}.")
        params = msgspec.structs.replace(
            params,
            seed=params.seed or secrets.randbits(62),
            max_tokens=min(params.max_tokens, geometry.context_length - len(ids)),
        )
        sid, self._next_sid = self._next_sid, self._next_sid + 1
        return Request(
            sid=sid, group=sid, request_id=f"llm-{sid}", prompt_ids=pack_ids(ids), params=params
        )

    # --- running

    def _finish_all(
        self, requests: list[Request], on_finish: Callable[[Output], None]
    ) -> list[Output]:
        outputs = self._submit(requests, on_finish)
        try:
            while any(output.finish_reason is None for output in outputs):
                self._step()
        finally:  # an interrupt leaves nothing running
            self._abort(request.sid for request in requests)
        return outputs

    def _submit(
        self,
        requests: list[Request],
        on_finish: Callable[[Output], None] = lambda output: None,
    ) -> list[Output]:
        outputs = []
        for request in requests:
            params = request.params
            text = Detokenizer(
                self._model.tokenizer,
                params.skip_special_tokens,
                params.stop,
                params.include_stop_str_in_output,
            )
            outputs.append(Output(prompt_tokens=len(request.prompt_ids) // 4))
            self._open[request.sid] = _Open(outputs[-1], text, on_finish)
        self._scheduler.submit(requests)
        self._hear()
        return outputs

    def _abort(self, sids: Iterable[int]) -> None:
        self._scheduler.abort([sid for sid in sids if self._open.pop(sid, None)])

    def _step(self) -> None:
        """Plan one step and take in one result."""
        scheduler, executor = self._scheduler, self._executor
        plan = scheduler.plan()
        if plan is not None:
            executor.submit(plan)
        out = scheduler.outstanding_steps
        if out and (plan is None or out >= STEPS_OUT):
            self._collect()
        self._hear()

    def _collect(self) -> None:
        oldest = self._scheduler.oldest_step
        try:
            result = self._executor.collect()
        except Exception as fault:  # whatever a kernel raises: its sequences end with an error
            log.exception("step %d failed", oldest)
            self._scheduler.abandon(oldest, f"The model failed on this prompt: {fault}.")
        else:
            self._scheduler.commit(result)

    def _hear(self) -> None:
        events = self._scheduler.outbox.take()
        if events is not None:
            self._take(events)

    def _take(self, events: TokenEvents) -> None:
        for started in events.started:
            if started.sid in self._open:
                self._open[started.sid].output.cached_tokens = started.cached_tokens
        for logprobs in events.logprobs:
            if logprobs.sid in self._open:
                self._open[logprobs.sid].output.logprobs.append(logprobs.logprob)
        sids = np.frombuffer(events.sids, np.int64).tolist()
        stopped = []
        for sid, token in zip(sids, unpack_ids(events.tokens).tolist(), strict=True):
            one = self._open.get(sid)
            if one is not None and one.push(token):
                stopped.append(sid)
        for finish in events.finished:
            one = self._open.pop(finish.sid, None)
            if one is not None:
                one.finish(finish)
        self._abort(stopped)


@dataclass(frozen=True)
class _Open:
    """A sequence that has not ended."""

    output: Output
    detokenizer: Detokenizer
    on_finish: Callable[[Output], None]

    def push(self, token: int) -> bool:
        """True where a stop string ended it with this token."""
        if self.output.finish_reason is not None:
            return False
        self.output.token_ids.append(token)
        self.output.text += self.detokenizer.push(token)
        if not self.detokenizer.stopped:
            return False
        self.output.stop = self.detokenizer.stopped
        self.output.finish_reason = "stop"
        self.on_finish(self.output)
        return True

    def finish(self, finish: Finish) -> None:
        if self.output.finish_reason is not None:
            return
        self.output.text += self.detokenizer.finish()
        self.output.error = finish.message
        self.output.stop = self.detokenizer.stopped
        self.output.finish_reason = "stop" if self.detokenizer.stopped else finish.reason
        self.on_finish(self.output)


_PARAMS = frozenset(SamplingParams.__struct_fields__)


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, a text or token ids, as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def config_of(model: str, options: Mapping[str, Any]) -> Config:
    """Raises ConfigError for an option that is not there."""
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"There is no option {name}.{hint}")
    named: dict[str, Any] = {"model": model} if model else {}
    return Config(**named, **options)
