"""What /v1/chat/completions is asked: messages, tools and thinking, made a prompt, and how the
answer to it is to be read.
"""

from dataclasses import dataclass
from typing import Any

from detour.api.answer import Answer, Thoughts
from detour.api.front import Front
from detour.api.prompts import Prompt
from detour.api.schema import ChatRequest
from detour.api.tool_choice import ToolChoice, ToolObjects, tool_choice
from detour.errors import BadRequest
from detour.text.reply_parser import ReplySyntax


@dataclass(frozen=True)
class Conversation:
    prompt: Prompt
    opening: str  # the prompt's end that is the beginning of the answer; "" = none
    tools: ToolObjects
    syntax: ReplySyntax  # less what the client does not want parted
    shows_special_tokens: bool  # some mark of the syntax is one
    one_call: bool
    gathers_thoughts: bool
    thoughts: Thoughts | None  # None = not told apart in the usage

    def answer(self) -> Answer | None:
        """What parts one choice's text; None where the text is the answer as it is."""
        parser = self.syntax.parser(self.prompt.text, self.tools, self.opening)
        return Answer(parser, self.one_call, self.gathers_thoughts) if parser else None


async def read_conversation(front: Front, body: ChatRequest) -> Conversation:
    """Raises BadRequest."""
    choice = tool_choice(body)
    syntax = front.settings.syntax
    if choice.tools and syntax.tool_parser is None:
        raise BadRequest(
            "This server reads no tool calls: it was started without --tool-call-parser, and the "
            "chat template shows none that is known. Leave tools out, or send tool_choice 'none'.",
            param="tools",
            code="unsupported",
        )
    opening = ""

    def open_call(text: str) -> str:
        nonlocal opening
        opening = syntax.opening(choice.name, choice.tools) if choice.must else ""
        return syntax.closed_thought(text) + opening if opening else ""

    prompt = await front.prompts.from_messages(
        body.messages,
        front.engine.ready.context_length,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=_template_kwargs(body, choice),
        tools=choice.tools,
        opening=open_call,
    )
    syntax = syntax.less(thinking=body.separate_reasoning is False, calls=not choice.tools)
    return Conversation(
        prompt=prompt,
        opening=opening,
        tools=choice.tools,
        syntax=syntax,
        shows_special_tokens=any(
            front.tokenizer.token_id(mark) in front.tokenizer.special_ids for mark in syntax.marks
        ),
        one_call=body.parallel_tool_calls is False,
        gathers_thoughts=body.stream_reasoning is False,
        thoughts=_thoughts(front, syntax, "" if opening else prompt.text),
    )


def _thoughts(front: Front, syntax: ReplySyntax, prompt: str) -> Thoughts | None:
    thinking, token_id = syntax.thinking, front.tokenizer.token_id
    if thinking is None or token_id(thinking.close) < 0:
        return None
    inside = bool(prompt) and thinking.opened_by(prompt)
    return Thoughts(token_id(thinking.open), token_id(thinking.close), inside)


def _template_kwargs(body: ChatRequest, choice: ToolChoice) -> dict[str, Any]:
    """The request's own, and what its other fields say of thinking under the names in use."""
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    reasoning = body.reasoning or {}
    effort = body.reasoning_effort or reasoning.get("effort")
    thinks = body.enable_thinking
    if thinks is None and isinstance(reasoning.get("enabled"), bool):
        thinks = reasoning["enabled"]
    if isinstance(effort, str):
        kwargs.setdefault("reasoning_effort", effort)
        if thinks is None:
            thinks = effort != "none"
    if thinks is None and choice.must:
        thinks = False  # the answer begins with a call
    if thinks is not None:
        kwargs.setdefault("enable_thinking", thinks)
        kwargs.setdefault("thinking", thinks)  # DeepSeek's and Kimi's name
    return kwargs
