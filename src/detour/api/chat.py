"""/v1/chat/completions. Knows OpenAI's chat shapes; what runs is Generation's affair."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from detour.api.answer import Answer
from detour.api.conversation import Conversation, read_conversation
from detour.api.front import Front, Want
from detour.api.generation import Choice, Generation
from detour.api.logprobs import chat_logprobs, scored_output
from detour.api.params import (
    number_of_choices,
    refuse_absent_features,
    sampling_params,
    wanted_logprobs,
)
from detour.api.replies import (
    OpenAIStream,
    chunk_head,
    encode_json,
    finish_reason,
    json_reply,
    usage,
)
from detour.api.schema import ChatRequest
from detour.text.tokenizer import Tokenizer


def chat_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(body: ChatRequest, http: Request) -> Response:
        """OpenAI's chat completions, streamed with `stream`."""
        model = front.check_model(body.model)
        refuse_absent_features(vars(body))
        talk = await read_conversation(front, body)
        envelope = front.envelope(http, body, body.request_id if body.rid is None else body.rid)
        params = sampling_params(
            body,
            front.settings.generation_defaults,
            logprobs=wanted_logprobs(bool(body.logprobs), body.top_logprobs, "top_logprobs"),
            shows_special_tokens=talk.shows_special_tokens,
        )
        most = body.max_completion_tokens
        want = Want(
            prompt=talk.prompt,
            params=params,
            n=number_of_choices(body.n),
            max_tokens=body.max_tokens if most is None else most,
            default_max_tokens=0,
        )
        reply = _Reply(front.tokenizer, body, front.generate([want], envelope), model, talk)
        if body.stream:
            return front.stream(reply.generation, reply.stream())
        if not await reply.generation.wait(http.receive):
            return Response(status_code=499)  # nobody is there to read it
        return json_reply(reply.whole())

    return router


_NO_EXTRAS = b',"logprobs":null,"finish_reason":null}'


class _Reply:
    """One conversation's answer, whole or in chunks."""

    __slots__ = (
        "_answers",
        "_before",
        "_head",
        "_id",
        "_model",
        "_options",
        "_role_sent",
        "_thoughts",
        "_tokenizer",
        "_with_logprobs",
        "_with_token_ids",
        "generation",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatRequest,
        generation: Generation,
        model: str,
        talk: Conversation,
    ) -> None:
        self.generation = generation
        # By choice: what parts its text; None where the text is the answer as it is.
        self._answers: Sequence[Answer | None] = [talk.answer() for _ in generation.choices]
        self._thoughts = talk.thoughts
        self._tokenizer = tokenizer
        self._with_logprobs = bool(body.logprobs)
        self._with_token_ids = bool(body.return_token_ids)
        self._options = body.stream_options
        self._id = f"chatcmpl-{generation.request_id}"
        self._model = model
        self._head = chunk_head(self._id, "chat.completion.chunk", generation.created, model)
        # What comes before a delta, or where answers are not parted before its text.
        text = b"" if any(self._answers) else b'{"content":'
        self._before = [
            b'%b{"index":%d,"delta":%b' % (self._head, choice.index, text)
            for choice in generation.choices
        ]
        self._role_sent = [False] * len(generation.choices)

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self.generation.created,
            "model": self._model,
            "choices": [self._choice(choice) for choice in self.generation.choices],
            "usage": usage(self.generation, self._thoughts),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer, text = self._answers[choice.index], choice.take_text()
        message = {"role": "assistant", "content": text}
        if answer is not None:
            message = answer.message(text, choice.finish_reason)
        result: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": finish_reason(choice, answer),
            "matched_stop": choice.matched_stop,
        }
        if self._with_token_ids:
            result["token_ids"] = choice.token_ids
        return result

    def stream(self) -> OpenAIStream:
        return OpenAIStream(
            self.generation, self._head, self._options, self._events, self._thoughts
        )

    def _events(self, choice: Choice, tail: bytes) -> bytes:
        """The role with a choice's first news, then its text, then its end."""
        events = b""
        if not self._role_sent[choice.index]:
            if not (choice.pieces or choice.finish_reason):
                return b""
            self._role_sent[choice.index] = True
            role = {"role": "assistant", "content": ""}
            events = self._event(choice, {"delta": role, "finish_reason": None}, tail)
        answer = self._answers[choice.index]
        if answer is not None:
            events += self._parted(choice, answer, tail)
        elif choice.pieces:
            if self._with_logprobs or self._with_token_ids:
                delta = {"content": choice.take_text()}
                events += self._event(choice, self._extras(choice, delta), tail)
            else:
                events += (
                    self._before[choice.index]
                    + encode_json(choice.take_text())
                    + b"}"
                    + _NO_EXTRAS
                    + tail
                )
        if choice.finish_reason:
            end = {
                "finish_reason": finish_reason(choice, answer),
                "matched_stop": choice.matched_stop,
            }
            events += self._event(choice, self._extras(choice, {}) | end, tail)
        return events

    def _parted(self, choice: Choice, answer: Answer, tail: bytes) -> bytes:
        """A chunk for each delta. Tokens that say nothing yet are told with the next one."""
        deltas = answer.push(choice.take_text()) if choice.pieces else []
        if choice.finish_reason:
            deltas += answer.finish(choice.finish_reason)
        if self._with_logprobs or self._with_token_ids:
            written = [self._event(choice, self._extras(choice, delta), tail) for delta in deltas]
        else:
            before, end = self._before[choice.index], _NO_EXTRAS + tail
            written = [before + encode_json(delta) + end for delta in deltas]
        return b"".join(written)

    def _extras(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"delta": delta, "logprobs": None, "finish_reason": None}
        tokens = choice.take_tokens()
        if self._with_logprobs and tokens:
            scored = scored_output(tokens, choice.take_logprobs())
            fields["logprobs"] = chat_logprobs(self._tokenizer, scored)
        if self._with_token_ids:
            fields["token_ids"] = tokens
        return fields

    def _event(self, choice: Choice, fields: dict[str, Any], tail: bytes) -> bytes:
        return self._head + encode_json({"index": choice.index, **fields}) + tail

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._tokenizer, scored_output(choice.token_ids, choice.logprobs))
