"""Which JSON types a tool's parameters take, and a model's text as JSON of such a type.

Knows OpenAI's tool objects and as much of JSON Schema as decides a type.
"""

import ast
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STRING = frozenset(("string",))
ANY = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))

_NAMES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
    "none": "null",
}
_LONGEST_LITERAL = 100_000  # characters that are tried as a Python literal
_DEEPEST = 32  # references and unions within each other


class Tools:
    """The tools of a request, by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {f["name"]: f.get("parameters") or {} for f in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def begin_with(self, text: str) -> bool:
        """Some tool's name does."""
        return any(name.startswith(text) for name in self._parameters)

    def needs_arguments(self, name: str) -> bool:
        return bool(self._parameters[name].get("required"))

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that the schema allows there; all where it does not say."""
        schema = self._parameters.get(name, {})
        found = _find_property(schema, schema, parameter, 0)
        return ANY if found is None else _types(found, schema, 0) or ANY


def _find_property(schema: Any, root: Any, name: str, depth: int) -> Any:
    """The schema of an object's property, looked for through references and unions; or None."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    branches = [_resolve(schema["$ref"], root)] if "$ref" in schema else []
    for key in ("allOf", "anyOf", "oneOf"):
        branches += schema.get(key) or []
    for branch in branches:
        found = _find_property(branch, root, name, depth + 1)
        if found is not None:
            return found
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """Empty where nothing is known."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    found = _own_types(schema)
    if not found and "$ref" in schema:
        found = _types(_resolve(schema["$ref"], root), root, depth + 1)
    for union in ("anyOf", "oneOf"):
        branches = [_types(branch, root, depth + 1) or ANY for branch in schema.get(union) or []]
        if branches and not found:
            found = frozenset[str]().union(*branches)
    if not found:
        known = [_types(branch, root, depth + 1) for branch in schema.get("allOf") or []]
        known = [types for types in known if types]
        found = frozenset.intersection(*known) if known else found
    return found | {"null"} if found and schema.get("nullable") is True else found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if given:
        names = [given] if isinstance(given, str) else [t for t in given if isinstance(t, str)]
        return frozenset(_NAMES.get(name.lower(), name.lower()) for name in names) & ANY
    if isinstance(schema.get("enum"), list):
        return frozenset(kind_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset((kind_of(schema["const"]),))
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def _resolve(reference: Any, root: Any) -> Any:
    """What "#/$defs/name" points at within the root; None if nothing."""
    place = root
    for part in str(reference).removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def kind_of(value: Any) -> str:
    """A value's JSON type; whole numbers are "integer", however they were written."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = ((float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((kind for python, kind in kinds if isinstance(value, python)), "object")


def to_json(text: str, types: Iterable[str]) -> str:
    """The text as one JSON value of these types, always valid: as a string where nothing else fits.

    Of a union the narrower branch wins: "null" is null wherever null is allowed.
    """
    types = frozenset(types)
    if types == STRING:
        return quoted(text)
    stripped = text.strip()
    for parse in (_json, _python) if "string" not in types else (_json,):
        value = parse(stripped)
        if isinstance(value, str) and "string" not in types and value != text:
            return to_json(value, types)  # encoded once too often
        if value is not _NOTHING and _fits(value, types):
            return _written(value, stripped if parse is _json else "", types)
    return quoted(text)


def quoted(text: str) -> str:
    """A JSON string, in the text's own characters."""
    return json.dumps(text, ensure_ascii=False)


_NOTHING = object()


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = kind_of(value)
    if kind == "string":
        return False  # what looks like a quoted text is a text with quotes
    return "string" not in types or kind in types or (kind == "integer" and "number" in types)


def _written(value: Any, text: str, types: frozenset[str]) -> str:
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        return str(int(value))  # 40.0 where an integer is wanted
    return text or json.dumps(value, ensure_ascii=False, allow_nan=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING


def _python(text: str) -> Any:
    """A Python literal, which models write instead of JSON now and then: True, {'a': 1}."""
    if len(text) > _LONGEST_LITERAL:
        return _NOTHING
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NOTHING
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
