"""Bare text becomes JSON of the type that a tool's schema says, and is always valid JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detour.text.tool_schema import ANY, Tools, to_json

DEFS = {"Day": {"enum": ["mon", "tue"]}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "null"}}


def convert(schema, text):
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": DEFS}
    function = {"name": "f", "parameters": parameters}
    types = Tools([{"type": "function", "function": function}]).types("f", "v")
    return json.loads(to_json(text, types))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, ' {"a": 1} ', ' {"a": 1} '),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "integer"}, "007", "007"),
        ({"type": "integer"}, "1e999", "1e999"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, r'"{\"a\": 1}"', {"a": 1}),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "integer"}, '"five"', "five"),
        ({"type": "object"}, "{'a': (1, None)}", {"a": [1, None]}),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "array"}, "[1, 1e999]", "[1, 1e999]"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "a, b", "a, b"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "true", True),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "True", "True"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "3", "3"),
        ({"allOf": [{"$ref": "#/$defs/Day"}]}, "3", "3"),
        ({"$ref": "#/$defs/Day"}, "null", "null"),
        ({"$ref": "#/$defs/a~1b"}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "#/nowhere"}, "[3]", [3]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "x"}, "1", "1"),
        ({"items": {}}, "[1]", [1]),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({}, "soon", "soon"),
        ({}, "3", 3),
        ({}, '"3"', '"3"'),
        (True, "true", True),
    ],
)
def test_value(schema, text, value):
    got = convert(schema, text)
    assert got == value and type(got) is type(value)


def test_parameters_are_found_where_schemas_hide_them():
    function = {
        "name": "f",
        "parameters": {
            "$defs": {"Base": {"properties": {"a": {"type": "string"}}}},
            "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"type": "integer"}}}],
            "additionalProperties": {"type": "boolean"},
            "required": ["a"],
        },
    }
    tools = Tools([{"function": function}, {"function": {"name": "g"}}])
    assert tools.types("f", "a") == {"string"} and tools.types("f", "b") == {"integer"}
    assert tools.types("f", "c") == {"boolean"} and tools.types("g", "c") == ANY
    assert tools.types("unknown", "c") == ANY
    assert tools.needs_arguments("f") and not tools.needs_arguments("g")


@given(st.text(), st.sets(st.sampled_from(sorted(ANY)), min_size=1))
def test_whatever_the_text_it_is_json(text, types):
    assert json.loads(to_json(text, types), parse_constant=pytest.fail) is not Ellipsis
