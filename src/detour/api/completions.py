"""/v1/completions. Knows OpenAI's completion shapes, echo and prompt log-probabilities."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from detour.api.front import Front, Want
from detour.api.generation import Choice, Generation
from detour.api.logprobs import Scored, completion_logprobs, scored_output, scored_prompt
from detour.api.params import number_of_choices, refuse_absent_features, sampling_params
from detour.api.prompts import Prompt
from detour.api.replies import (
    OpenAIStream,
    chunk_head,
    encode_json,
    finish_reason,
    json_reply,
    usage,
)
from detour.api.schema import CompletionRequest
from detour.errors import BadRequest
from detour.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 4_096


def completions_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", summary="Continue a text")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """OpenAI's completions, streamed with `stream`. Choices stand in the prompts' order."""
        model = front.check_model(body.model)
        refuse_absent_features(vars(body))
        n = number_of_choices(body.n)
        _refuse_unserved(body, n)
        envelope = front.envelope(http, body, body.request_id if body.rid is None else body.rid)
        logprobs = -1 if body.logprobs is None else body.logprobs
        params = sampling_params(
            body,
            front.settings.generation_defaults,
            logprobs=logprobs,
            prompt_logprobs=logprobs if body.echo else -1,
        )
        prompts = await _prompts(front, body)
        wants = [Want(prompt, params, n, body.max_tokens, DEFAULT_MAX_TOKENS) for prompt in prompts]
        generation = front.generate(wants, envelope)
        echoes = await _echoes(front, prompts) if body.echo else None
        reply = _Reply(front.tokenizer, body, generation, model, echoes)
        if body.stream:
            return front.stream(generation, reply.stream())
        if not await generation.wait(http.receive):
            return Response(status_code=499)  # nobody is there to read it
        return json_reply(reply.whole())

    return router


def _refuse_unserved(body: CompletionRequest, n: int) -> None:
    if body.best_of is not None and body.best_of != n:
        raise BadRequest(
            f"best_of must equal n (best_of {body.best_of}, n {n}): all choices are returned.",
            param="best_of",
        )
    if body.suffix:
        raise BadRequest("suffix is not supported.", param="suffix", code="unsupported")
    if body.logprobs is not None and body.logprobs < 0:
        raise BadRequest(f"logprobs must not be negative, got {body.logprobs}.", param="logprobs")


async def _prompts(front: Front, body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if not given:
        raise BadRequest("prompt must not be empty.", param="prompt")
    is_one = isinstance(given, str) or isinstance(given[0], int)
    items: Sequence[Any] = [given] if is_one else given
    if len(items) > MAX_PROMPTS:
        raise BadRequest(f"prompt takes at most {MAX_PROMPTS} prompts.", param="prompt")
    context_length = front.engine.ready.context_length
    with_special = body.add_special_tokens is not False
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            prompts.append(await front.prompts.from_text(item, context_length, with_special))
        else:
            front.prompts.check_ids(item, front.engine.ready.vocab_size, "prompt")
            prompts.append(Prompt(item))
    return prompts


async def _echoes(front: Front, prompts: Sequence[Prompt]) -> list[str]:
    return [
        prompt.text or await front.prompts.decode(prompt.ids, skip_special_tokens=False)
        for prompt in prompts
    ]


class _Reply:
    """The answer to all prompts of a request, whole or in chunks."""

    __slots__ = (
        "_before_text",
        "_echoes",
        "_generation",
        "_head",
        "_id",
        "_model",
        "_offsets",
        "_only_text",
        "_options",
        "_tokenizer",
        "_with_logprobs",
        "_with_token_ids",
        "_with_top",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        generation: Generation,
        model: str,
        echoes: list[str] | None,  # of each prompt; None = no echo
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._with_logprobs = body.logprobs is not None
        self._with_top = bool(body.logprobs)
        self._with_token_ids = bool(body.return_token_ids)
        self._only_text = not (self._with_logprobs or self._with_token_ids or echoes is not None)
        self._options = body.stream_options
        self._id = f"cmpl-{generation.request_id}"
        self._model = model
        self._head = chunk_head(self._id, "text_completion", generation.created, model)
        self._before_text = [
            b'%b{"index":%d,"text":' % (self._head, choice.index) for choice in generation.choices
        ]
        # Characters sent so far, for text_offset; -1 = the echo is still to be sent.
        self._offsets = [0 if echoes is None else -1] * len(generation.choices)

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._model,
            "choices": [
                {"index": choice.index}
                | self._part(choice)
                | {
                    "finish_reason": finish_reason(choice),
                    "matched_stop": choice.matched_stop,
                }
                for choice in self._generation.choices
            ],
            "usage": usage(self._generation),
        }

    def stream(self) -> OpenAIStream:
        return OpenAIStream(self._generation, self._head, self._options, self._events)

    def _events(self, choice: Choice, tail: bytes) -> bytes:
        ends = choice.finish_reason
        if not choice.pieces and not ends:
            return b""
        if self._only_text and not ends:
            return (
                self._before_text[choice.index]
                + encode_json(choice.take_text())
                + b',"logprobs":null,"finish_reason":null}'
                + tail
            )
        fields = self._part(choice)
        fields["finish_reason"] = finish_reason(choice)
        if ends:
            fields["matched_stop"] = choice.matched_stop
        return self._head + encode_json({"index": choice.index, **fields}) + tail

    def _part(self, choice: Choice) -> dict[str, Any]:
        """What is new of a choice: text, logprobs and ids, the echo before the first."""
        text = choice.take_text()
        tokens = choice.take_tokens()
        scored: list[Scored] = []
        offset = self._offsets[choice.index]
        if offset < 0:
            assert self._echoes is not None, "an echo is pending only where one was asked for"
            text = self._echoes[choice.prompt_index] + text
            offset = 0
            if self._with_logprobs:
                prompt_ids = choice.prompt_ids
                scored = scored_prompt(prompt_ids, choice.prompt_logprobs)
        self._offsets[choice.index] = offset + len(text)
        fields: dict[str, Any] = {"text": text, "logprobs": None}
        if self._with_logprobs:
            scored += scored_output(tokens, choice.take_logprobs())
            fields["logprobs"] = completion_logprobs(
                self._tokenizer, scored, self._with_top, offset
            )
        if self._with_token_ids:
            fields["token_ids"] = tokens
        return fields
