"""What a client asks of tools: which there are, and whether one must be called.

Knows OpenAI's shapes of `tools` and `tool_choice`; nothing of how a model writes a call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detour.api.schema import ChatRequest
from detour.errors import BadRequest

ToolObjects = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolChoice:
    tools: ToolObjects = ()  # those that the model may call
    must: bool = False  # the answer is to be a call
    name: str = ""  # of this function, "" = any


def tool_choice(body: ChatRequest) -> ToolChoice:
    """Raises BadRequest for tools or a choice that mean nothing or are not served."""
    choice: Any = body.tool_choice
    tools = body.tools or []
    if choice == "none":
        return ToolChoice()
    names = [_name(tool, place) for place, tool in enumerate(tools)]
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if isinstance(choice, str) and choice != "required":
        raise _wrong(
            f"must be 'none', 'auto', 'required' or name a function, not {choice!r}.", "tool_choice"
        )
    if not tools:
        raise _wrong("needs tools to choose from.", "tool_choice")
    if choice == "required":
        return ToolChoice(tools, True)
    name = _chosen(choice)
    if name not in names:
        raise _wrong(
            f"names {name!r}, which is not among the tools: {', '.join(names)}.", "tool_choice"
        )
    return ToolChoice(tools, True, name)


def _name(tool: Mapping[str, Any], place: int) -> str:
    param = f"tools[{place}]"
    if tool.get("type", "function") != "function":
        raise _absent(f"is of type {tool['type']!r}; only functions can be called here.", param)
    function: Any = tool.get("function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name or any(c.isspace() or c in "<>\"'" for c in name):
        raise _wrong(
            "must hold a function with a name of letters, digits, '_', '-' and '.'.", param
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise _wrong("must give its function's parameters as a JSON schema, an object.", param)
    return name


def _chosen(choice: Mapping[str, Any]) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or right in the object."""
    kind = choice.get("type", "function")
    if kind != "function":
        raise _absent(
            f"of type {kind!r} is not supported yet; send only the tools that may be called, "
            "with 'auto' or 'required'.",
            "tool_choice",
        )
    holder = choice.get("function", choice)
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str):
        raise _wrong("must name a function: function.name is missing.", "tool_choice")
    return name


def _wrong(what: str, param: str) -> BadRequest:
    return BadRequest(f"{param} {what}", param=param)


def _absent(what: str, param: str) -> BadRequest:
    return BadRequest(f"{param} {what}", param=param, code="unsupported")
