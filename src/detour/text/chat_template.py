"""Messages and tools to one prompt, by the model's own Jinja template.

Templates are programs from a download: they run in Jinja's sandbox. What they may call is what
`transformers` gives them, so that a template written for it renders the same here.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from detour.errors import BadRequest, CheckpointError

# Stands at the end of the last message while rendering, to find where the prompt has to be cut.
# Its last space shows whether the template trims messages.
_CUT = "\ue000detour-cut\ue001 "

Message = dict[str, Any]


class _Refused(Exception):
    """What a template's raise_exception(...) raises."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here its content just stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Rendering holds no state, so any number of threads may do it.

    Raises CheckpointError for a template that is no valid Jinja.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """bos, eos: the begin and end tokens' texts. now: the clock that templates may ask."""
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"The chat template is no valid Jinja: {error.message} in line {error.lineno}."
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] = {},
    ) -> str:
        """The prompt for these messages.

        messages: OpenAI's, their content a string or None unless the template takes parts.
        tools: OpenAI's tool objects; none = the template sees no tools at all.
        add_generation_prompt: end with the beginning of an assistant message.
        continue_final_message: leave the last message open, so that the model goes on with it.
        kwargs: the request's chat_template_kwargs, as template variables.

        Raises BadRequest with the template's own words where it refuses the messages.
        """
        if not self.source:
            raise BadRequest(
                "The model has no chat template: send a prompt to /v1/completions instead, or "
                "start the server with a template."
            )
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        if not continue_final_message:
            return self._run(messages, tools, add_generation_prompt, kwargs)
        return _cut(self._run(_marked(messages), tools, False, kwargs))

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        variables = {
            **self._tokens,
            "tools": list(tools) or None,
            "documents": None,
            **kwargs,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _Refused as error:
            text = f"The chat template refuses this: {error}"
            raise BadRequest(text, param="messages") from error
        except jinja2.TemplateError as error:
            text = f"The chat template cannot render these messages: {error}"
            raise BadRequest(f"{text.rstrip('.')}.", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            # A template that meets a shape its author did not think of fails as Python code does.
            text = (
                f"The chat template cannot render these messages: {type(error).__name__}, {error}."
            )
            raise BadRequest(text, param="messages") from error


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark at the end of the last one's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _CUT}]
    texts = [p for p in content or [] if isinstance(p, dict) and isinstance(p.get("text"), str)]
    if not isinstance(content, list) or not texts or content[-1] is not texts[-1]:
        raise BadRequest(
            "continue_final_message takes a last message that ends in text.", param="messages"
        )
    part = {**content[-1], "text": content[-1]["text"] + _CUT}
    return [*messages[:-1], {**last, "content": [*content[:-1], part]}]


def _cut(text: str) -> str:
    """The prompt up to where the last message's text ends, trimmed if the template trims it."""
    before, mark, _ = text.rpartition(_CUT)
    if mark:
        return before
    before, mark, _ = text.rpartition(_CUT.rstrip())
    if not mark:
        raise BadRequest(
            "The chat template does not show the last message as it is, so it cannot be continued.",
            param="continue_final_message",
        )
    return before.rstrip()


def _raise(message: str) -> str:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: Unicode as it is and no HTML escapes, unlike Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
