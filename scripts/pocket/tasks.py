"""Synthetic conversations with one right answer each: copying, recall, sums, calls of tools.

    python scripts/pocket/tasks.py      prints some

A task is a function of a source of chance and of about how many tokens it may take. Knows no
tokens and no torch. The same generator makes training and test tasks, from seeds far apart.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from words import COUNTS, FIELDS, OBJECTS, VERBS, distinct, number, word

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A conversation. What the model is to say are its assistant messages."""

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, thought: str = "", calls: tuple[Message, ...] = ()) -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning_content": thought}
    return {**message, "tool_calls": list(calls)} if calls else message


def copying(source: random.Random, room: int) -> Task:
    count = source.randint(2, max(2, (room - 20) // 5))
    text = " ".join(distinct(source, count))
    return Task("copying", [user(f"Repeat: {text}"), says(text, "copy")])


def recall(source: random.Random, room: int) -> Task:
    """Pairs of keys and values, then questions for some of them."""
    asked = source.randint(1, min(3, 1 + room // 60))
    count = max(2, min(150, (room - 30 - 16 * asked) // 5))
    count = source.randint(max(2, count // 2), count)
    keys = distinct(source, count)
    values = [word(source) if source.random() < 0.6 else number(source, 2) for _ in keys]
    table = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    places = [source.randrange(count) for _ in range(asked)]
    messages = [{"role": "system", "content": table}] if source.random() < 0.3 else []
    lead = "" if messages else f"{table}\n"
    for place in places:
        key, value = keys[place], values[place]
        messages += [user(f"{lead}What is {key}?"), says(value, f"{key}: {value}")]
        lead = ""
    return Task("recall", messages)


def sums(source: random.Random, room: int) -> Task:
    """An addition digit by digit, the carry in the open, or a product of two digits."""
    if source.random() < 0.25:
        one, two = source.randint(0, 9), source.randint(0, 9)
        text, thought, result = f"{one} * {two}", f"{one}*{two}={one * two}", one * two
    else:
        one, two = int(number(source, 3)), int(number(source, 3))
        text, thought, result = f"{one} + {two}", column_sum(one, two), one + two
    return Task("sums", [user(f"What is {text}?"), says(str(result), thought)])


def column_sum(one: int, two: int) -> str:
    """47 + 38 as "7+8+0=15,4+3+1=8": from the last digit on, each with the carry."""
    steps, carry = [], 0
    while one or two or not steps:
        total = one % 10 + two % 10 + carry
        steps.append(f"{one % 10}+{two % 10}+{carry}={total}")
        one, two, carry = one // 10, two // 10, total // 10
    return ",".join(steps)


def calls(source: random.Random, room: int) -> Task:
    """Requests for one of some tools, whose parameters' names only the schema tells."""
    count = source.randint(1, max(1, min(5, (room - 60) // 70)))
    names: dict[str, list[str]] = {}
    verbs, objects = source.sample(VERBS, 3), source.sample(OBJECTS, 3)
    while len(names) < count:  # few words, so that names have halves in common
        fields = source.sample(FIELDS, source.choice((0, 1, 1, 2, 2, 3)))
        names[f"{source.choice(verbs)}_{source.choice(objects)}"] = fields
    described = source.random() < 0.3
    tools = [tool(name, fields, described) for name, fields in names.items()]
    messages: list[Message] = []
    for _ in range(source.randint(1, max(1, min(4, (room - 70 * count) // 70)))):
        name = source.choice(list(names))
        messages += request(source, name, names[name])
    if source.random() < 0.6:
        del messages[-2:]  # ends with the call
    return Task("calls", messages, tools)


def request(source: random.Random, name: str, fields: list[str]) -> list[Message]:
    """What is asked for, with the parameters' names or without, the call, the tool's response and
    what is made of it."""
    values = {field: argument(source, field) for field in fields}
    named = source.random() < 0.5
    given = [f"{field}={value}" if named else str(value) for field, value in values.items()]
    function = {"name": name, "arguments": values}
    call = {"type": "function", "id": "call", "function": function}
    response = word(source)
    return [
        user(f"{name}({', '.join(given)})"),
        says("", name, (call,)),
        {"role": "tool", "content": response},
        says(response, "done"),
    ]


def argument(source: random.Random, name: str) -> str | int:
    if name in COUNTS:
        return int(number(source, 2))
    return word(source) if source.random() < 0.85 else f"{word(source)} {word(source)}"


def tool(name: str, fields: list[str], described: bool = False) -> dict[str, Any]:
    """OpenAI's object for a function."""
    kinds = {one: {"type": "integer" if one in COUNTS else "string"} for one in fields}
    about = {"description": name.replace("_", " ")} if described else {}
    parameters = {"type": "object", "properties": kinds, "required": fields}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters}}


TASKS: dict[str, Callable[[random.Random, int], Task]] = {
    "copying": copying,
    "recall": recall,
    "sums": sums,
    "calls": calls,
}

if __name__ == "__main__":
    chance = random.Random(1)
    for make in TASKS.values():
        print(make(chance, 200), end="\n\n")
