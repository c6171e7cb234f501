"""/tokenize and /detokenize, in the shapes of SGLang and vLLM at once."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from detour.api.front import Front
from detour.api.replies import json_reply
from detour.api.schema import DetokenizeRequest, TokenizeRequest
from detour.errors import BadRequest

_NO_LIMIT = 1 << 40  # a text may be longer than the context here


def tokens_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["Tokens"])

    @router.post("/tokenize", summary="Text or a conversation to token ids")
    @router.post("/v1/tokenize", summary="As /tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """A list of texts gives a list of lists."""
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("Send either prompt or messages.", param="prompt")
        tokens, count = await _tokens(front, body)
        length = front.engine.ready.context_length
        return json_reply({"tokens": tokens, "count": count, "max_model_len": length})

    @router.post("/detokenize", summary="Token ids to text")
    @router.post("/v1/detokenize", summary="As /detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """A list of lists gives a list of texts."""
        front.check_model(body.model)
        skip = body.skip_special_tokens is not False
        text: Any
        if body.tokens and isinstance(body.tokens[0], list):
            text = [await front.prompts.decode(row, skip) for row in body.tokens]
        else:
            text = await front.prompts.decode(body.tokens, skip)  # type: ignore[arg-type]
        return json_reply({"text": text, "prompt": text})

    return router


async def _tokens(front: Front, body: TokenizeRequest) -> tuple[Any, Any]:
    """Ids and their count, or lists of both."""
    if body.messages is not None:
        prompt = await front.prompts.from_messages(
            body.messages,
            _NO_LIMIT,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
        return prompt.ids, len(prompt.ids)
    with_special = body.add_special_tokens is not False
    if isinstance(body.prompt, str):
        ids = (await front.prompts.from_text(body.prompt, _NO_LIMIT, with_special)).ids
        return ids, len(ids)
    rows = [
        (await front.prompts.from_text(text, _NO_LIMIT, with_special)).ids
        for text in body.prompt or ()
    ]
    return rows, [len(row) for row in rows]
