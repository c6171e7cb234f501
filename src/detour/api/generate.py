"""/generate: SGLang's native route. Knows its shapes; a list of prompts (or n > 1) gives a list."""

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from detour.api.front import Front, Want
from detour.api.generation import Choice, Generation
from detour.api.logprobs import native_logprobs, scored_output, scored_prompt
from detour.api.params import (
    number_of_choices,
    refuse_absent_features,
    sampling_params,
    wanted_logprobs,
)
from detour.api.prompts import Prompt
from detour.api.replies import encode_json, error_event, json_reply
from detour.api.schema import GenerateRequest, NativeSampling
from detour.api.sse import DONE
from detour.errors import BadRequest, DetourError
from detour.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128  # SGLang's
MAX_PROMPTS = 4_096

_T = TypeVar("_T")


def generate_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["Native"])

    @router.post("/generate", summary="Continue prompts, SGLang's way")
    async def generate(body: GenerateRequest, http: Request) -> Response:
        """Text or token ids in, text and `meta_info` out; stream chunks carry all text so far."""
        refuse_absent_features(vars(body))
        rid = body.rid if isinstance(body.rid, str) else None
        envelope = front.envelope(http, body, rid)
        prompts, is_list = await _prompts(front, body)
        wants = [_want(front, body, prompt, place) for place, prompt in enumerate(prompts)]
        generation = front.generate(wants, envelope)
        reply = _Reply(front, body, generation, is_list or len(generation.choices) > 1)
        if body.stream:
            return front.stream(generation, reply)
        if not await generation.wait(http.receive):
            return Response(status_code=499)  # nobody is there to read it
        return json_reply(reply.whole())

    return router


async def _prompts(front: Front, body: GenerateRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a list was sent."""
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("Send either text or input_ids.", param="text")
    context_length = front.engine.ready.context_length
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        _check_count(len(texts), "text")
        prompts = [await front.prompts.from_text(text, context_length) for text in texts]
        return prompts, not isinstance(body.text, str)
    ids = body.input_ids or []
    _check_count(len(ids), "input_ids")
    is_list = isinstance(ids[0], list)
    rows: list[list[int]] = ids if is_list else [ids]  # type: ignore[assignment,list-item]
    _check_count(len(rows), "input_ids")
    for row in rows:
        front.prompts.check_ids(row, front.engine.ready.vocab_size, "input_ids")
    return [Prompt(row) for row in rows], is_list


def _check_count(count: int, param: str) -> None:
    if count == 0:
        raise BadRequest(f"{param} must not be empty.", param=param)
    if param == "text" and count > MAX_PROMPTS:
        raise BadRequest(f"{param} takes at most {MAX_PROMPTS} prompts.", param=param)


def _want(front: Front, body: GenerateRequest, prompt: Prompt, place: int) -> Want:
    fields = _of(body.sampling_params, place, "sampling_params")
    fields = fields or NativeSampling.model_construct()
    refuse_absent_features(vars(fields))
    asked = bool(_of(body.return_logprob, place, "return_logprob"))
    top = _of(body.top_logprobs_num, place, "top_logprobs_num")
    start = _of(body.logprob_start_len, place, "logprob_start_len")
    logprobs = wanted_logprobs(asked, top, "top_logprobs_num")
    with_prompt = asked and start is not None and start >= 0
    params = sampling_params(
        fields,
        front.settings.generation_defaults,
        logprobs=logprobs,
        prompt_logprobs=logprobs if with_prompt else -1,
    )
    n = number_of_choices(fields.n)
    return Want(prompt, params, n, fields.max_new_tokens, DEFAULT_MAX_TOKENS)


def _of(value: "_T | Sequence[_T] | None", place: int, param: str) -> "_T | None":
    """The value for one prompt: lists hold one for each. Raises BadRequest for a short list."""
    if not isinstance(value, list):
        return value  # type: ignore[return-value]
    if place >= len(value):
        raise BadRequest(f"{param} must have one entry for each prompt.", param=param)
    return value[place]  # type: ignore[no-any-return]


class _Reply:
    """The answer, whole or (as a Source) in chunks."""

    def __init__(
        self, front: Front, body: GenerateRequest, generation: Generation, as_list: bool
    ) -> None:
        self._tokenizer: Tokenizer = front.tokenizer
        self._generation = generation
        self._as_list = as_list
        self._with_text = bool(body.return_text_in_logprobs)
        self._starts = [
            max(0, _of(body.logprob_start_len, choice.prompt_index, "logprob_start_len") or 0)
            for choice in generation.choices
        ]
        self._rids = body.rid if isinstance(body.rid, list) else []
        self._incremental = front.settings.incremental_stream
        self._texts = [""] * len(generation.choices)
        self._told = [False] * len(generation.choices)  # its finish reason was sent

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        results = []
        for choice in self._generation.choices:
            self._texts[choice.index] = choice.take_text()
            results.append(self._result(choice))
        return results if self._as_list else results[0]

    # --- Source

    @property
    def failure(self) -> DetourError | None:
        return self._generation.failure

    def abandon(self) -> None:
        self._generation.abandon()

    def take(self) -> tuple[bytes, bool]:
        if self._generation.failure is not None:
            return error_event(self._generation.failure) + DONE, True
        events = b""
        for choice in self._generation.choices:
            if self._told[choice.index] or not (choice.pieces or choice.finish_reason):
                continue
            self._told[choice.index] = bool(choice.finish_reason)
            fresh = choice.take_text()
            before = "" if self._incremental else self._texts[choice.index]
            self._texts[choice.index] = before + fresh
            result = self._result(choice)
            if self._as_list:
                result["index"] = choice.index
            events += b"data: " + encode_json(result) + b"\n\n"
        last = self._generation.finished
        return (events + DONE if last else events), last

    def _result(self, choice: Choice) -> dict[str, Any]:
        ids = choice.take_tokens() if self._incremental else choice.token_ids
        meta: dict[str, Any] = {
            "id": self._id(choice),
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": len(choice.request.prompt_ids) // 4,
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
        }
        if choice.finish_reason:
            meta["e2e_latency"] = self._generation.seconds
        if choice.request.params.logprobs >= 0:
            self._add_logprobs(choice, meta)
        return {"text": self._texts[choice.index], "output_ids": ids, "meta_info": meta}

    def _id(self, choice: Choice) -> str:
        if choice.prompt_index < len(self._rids):
            return self._rids[choice.prompt_index]
        rid = self._generation.request_id
        return f"{rid}_{choice.index}" if self._as_list else rid

    def _add_logprobs(self, choice: Choice, meta: dict[str, Any]) -> None:
        scored = scored_output(choice.token_ids, choice.logprobs)
        own, top = native_logprobs(self._tokenizer, scored, self._with_text)
        meta["output_token_logprobs"] = own
        meta["output_top_logprobs"] = top
        if choice.request.params.prompt_logprobs >= 0:
            prompt = scored_prompt(choice.prompt_ids, choice.prompt_logprobs)
            start = self._starts[choice.index]
            own, top = native_logprobs(self._tokenizer, prompt[start:], self._with_text)
        else:
            own, top = [], []
        meta["input_token_logprobs"] = own
        meta["input_top_logprobs"] = top


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    match choice.finish_reason:
        case "":
            return None
        case "length":
            return {"type": "length", "length": choice.request.params.max_tokens}
        case "abort":
            return {"type": "abort", "message": "The request was aborted."}
        case reason:
            return {"type": reason, "matched": choice.matched_stop}
