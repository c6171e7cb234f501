"""What every route that generates needs: from prompts and params to a running Generation.

Knows the engine handle, the tokenizer and the settings; nothing of any reply's shape.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from detour.api.failures import error_response
from detour.api.generation import Choice, Generation
from detour.api.guard import REQUEST_ID, check_request_id
from detour.api.params import check_text, choice_params
from detour.api.prompts import Prompt, Prompts, over_context
from detour.api.settings import ApiSettings
from detour.api.sse import EventStream, Source
from detour.engine.client import EngineHandle
from detour.engine.request import Request, pack_ids
from detour.errors import BadRequest, NotFound
from detour.metrics import Metrics
from detour.sampling_params import SamplingParams
from detour.text.chat_template import ChatTemplate
from detour.text.detokenizer import Detokenizer
from detour.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Envelope:
    """What a client says of its request beside prompt and sampling."""

    request_id: str
    arrived: float  # time.perf_counter()
    priority: int = 0
    cache_salt: str = ""
    deadline: float = 0.0  # time.time(); 0 = none


@dataclass(frozen=True)
class Want:
    """One prompt and what is asked of it."""

    prompt: Prompt
    params: SamplingParams  # max_tokens is filled in by Front.generate
    n: int
    max_tokens: int | None  # as sent
    default_max_tokens: int  # 0 = what the context leaves


class Front:
    def __init__(
        self,
        engine: EngineHandle,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        settings: ApiSettings,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.prompts = Prompts(tokenizer, template, settings.tokenizer_threads)
        self.metrics = Metrics(settings.names[0])
        self.started_at = int(time.time())
        self.open: dict[str, set[Generation]] = {}  # by request id, for /abort_request

    def check_model(self, name: str | None) -> str:
        """The name for the reply. Raises NotFound for a model that is not served."""
        names = self.settings.names
        if not name or name in names or name in ("default", self.settings.model_path):
            return name if name in names else names[0]
        raise NotFound(
            f"The model {name!r} is not served here; served: {', '.join(names)}.",
            param="model",
            code="model_not_found",
        )

    def envelope(self, http: HttpRequest, fields: Any, rid: str | None) -> Envelope:
        """Raises BadRequest for a bad rid or timeout. `fields` is one of the request bodies."""
        seconds = fields.timeout
        if seconds is None:
            seconds = self.settings.default_deadline
        elif not 0 < seconds < 1e9:
            raise BadRequest(
                f"timeout must be a number of seconds above 0, got {seconds}.", param="timeout"
            )
        return Envelope(
            request_id=check_request_id(rid) if rid is not None else http.scope[REQUEST_ID],
            arrived=time.perf_counter(),
            priority=fields.priority or 0,
            cache_salt=check_text(fields.cache_salt or fields.extra_key or "", "cache_salt"),
            deadline=time.time() + seconds if seconds else 0.0,
        )

    def generate(self, wants: Sequence[Want], envelope: Envelope) -> Generation:
        """Submit n sequences for each prompt. Choice i * n + j is choice j of prompt i.

        Raises BadRequest (params, context), Unavailable (queue full, draining, no engine).
        """
        sids = iter(self.engine.new_sids(sum(want.n for want in wants)))
        choices: list[Choice] = []
        for prompt_index, want in enumerate(wants):
            params = self._checked(want)
            packed = pack_ids(list(want.prompt.ids))
            group = -1
            for number in range(want.n):
                sid = next(sids)
                group = sid if group < 0 else group
                request = Request(
                    sid=sid,
                    group=group,
                    request_id=envelope.request_id,
                    prompt_ids=packed,
                    params=choice_params(params, number),
                    priority=envelope.priority,
                    deadline=envelope.deadline,
                    cache_salt=envelope.cache_salt,
                )
                choice = Choice(len(choices), prompt_index, request, self._detokenizer(params))
                choice.drops_tokens = want.max_tokens == 0
                choices.append(choice)
        generation = Generation(
            self.engine, self.metrics, envelope.request_id, choices, envelope.arrived
        )
        generation.submit()
        self._remember(generation)
        return generation

    def stream(self, generation: Generation, source: Source) -> EventStream:
        response = EventStream(source, error_response)
        generation.on_change = response.wake
        return response

    def _checked(self, want: Want) -> SamplingParams:
        """Params with max_tokens settled and every range checked."""
        ready = self.engine.ready
        length = len(want.prompt.ids)
        left = ready.context_length - length
        if length == 0:
            raise BadRequest("The prompt has no tokens.", param="prompt")
        if left < 1:
            raise over_context(length, ready.context_length)
        asked = want.max_tokens
        if asked is None:
            asked = min(want.default_max_tokens or left, left)
        elif asked > left:
            raise BadRequest(
                f"The prompt has {length} tokens and max_tokens asks for {asked}, but this "
                f"server's context holds {ready.context_length} in all.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        params = msgspec.structs.replace(want.params, max_tokens=asked)
        params.check(ready.vocab_size)
        if asked == 0:  # the engine's least is one token; the choice drops it
            params = msgspec.structs.replace(params, max_tokens=1)
        return params

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.tokenizer,
            params.skip_special_tokens,
            params.stop,
            params.include_stop_str_in_output,
        )

    def _remember(self, generation: Generation) -> None:
        rid = generation.request_id
        self.open.setdefault(rid, set()).add(generation)

        def forget() -> None:
            still = self.open.get(rid, set())
            still.discard(generation)
            if not still:
                self.open.pop(rid, None)

        generation.on_end = forget
