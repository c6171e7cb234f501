"""What an option is: its spellings, its values and what is said of it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Convert = Callable[[str], Any]

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def integer(text: str) -> int:
    """A whole number; 32k is 32,000 and 32K 32,768, as vLLM users write it. Raises ValueError."""
    if text[-1:] in _SUFFIXES:
        return round(float(text[:-1]) * _SUFFIXES[text[-1]])
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


# What people call the values of a conversion, for messages.
KINDS: Mapping[Convert, str] = {
    str: "a text",
    integer: "a whole number",
    float: "a number",
    json_object: "a JSON object",
}


@dataclass(frozen=True)
class Option:
    """How a field of Config is said on the command line.

    flags      spellings that take a value; for a switch, those that turn it on
    sets       spellings that take no value and set the field to the one given here
    choices    the values there are; empty = any
    synonyms   other spellings of a value
    stand_ins  values of other servers that are not here -> (the value used, why)
    """

    flags: tuple[str, ...]
    help: str
    group: str
    convert: Convert = str
    switch: bool = False
    repeated: bool = False
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""  # the ops whose backend this option wishes for, between spaces
    secret: bool = False  # never shown


def option(
    default: Any,
    flags: str,
    help: str,
    *,
    group: str,
    convert: Convert = str,
    **more: Any,
) -> Any:
    """A dataclass field with its Option. `flags` stand between spaces, the one to print first."""
    made = Option(
        tuple(flags.split()), help, group, convert, switch=isinstance(default, bool), **more
    )
    if isinstance(default, dict | list):
        return dataclasses.field(
            default_factory=lambda: type(default)(default), metadata={"option": made}
        )
    return dataclasses.field(default=default, metadata={"option": made})


@dataclass(frozen=True)
class Accepted:
    """A flag of another server whose feature is not here; its value only decides whether to speak.

    takes    "value", "values" (one or more), "json" or "switch"
    instead  what is used instead: completes the sentence "--flag: ..."
    quiet    values that ask for what is done anyway; "on" for a switch
    """

    flag: str
    takes: str
    instead: str
    quiet: frozenset[str] = frozenset()


def rows(
    instead: str,
    *,
    quiet: str = "",
    value: str = "",
    values: str = "",
    json: str = "",
    switch: str = "",
) -> Iterator[Accepted]:
    """One row a flag: those that take a value, several values, a JSON text, or nothing."""
    by_kind = {"value": value, "values": values, "json": json, "switch": switch}
    for takes, flags in by_kind.items():
        for flag in flags.split():
            yield Accepted(flag, takes, instead, frozenset(quiet.split()))
