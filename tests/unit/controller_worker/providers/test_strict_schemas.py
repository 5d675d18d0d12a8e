"""Schemas that a provider accepts for strict tools, and the parsing of their calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.codec import action_kinds
from broker.contract.tool_specs import ToolSpec
from broker.tools.output_schema import find_violations
from controller_worker.providers.strict_schemas import remove_forced_nulls, to_strict_schema, to_strict_tools

EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where."},
        "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "range": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/place"},
        "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["path"],
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]}
    },
}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_openai_requires_all_fields_and_optional_ones_may_be_null() -> None:
    assert to_strict_schema(EDIT, optional_as_null=True) == {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where."},
            "mode": {"type": ["string", "null"], "enum": ["a", "b", None]},
            "range": {"type": ["array", "null"], "items": {"type": "integer"}},
            "place": {
                "type": ["object", "null"],
                "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "any": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        },
        "required": ["path", "mode", "range", "place", "any"],
        "additionalProperties": False,
    }


def test_for_anthropic_what_is_optional_stays_so() -> None:
    found = to_strict_schema(EDIT, optional_as_null=False)
    assert found is not None
    assert found["required"] == ["path"]
    assert found["properties"]["mode"] == {"type": "string", "enum": ["a", "b"]}
    assert found["properties"]["place"]["required"] == ["x"]


@pytest.mark.parametrize(
    "schema",
    [
        of(a={"type": "object"}),
        of(a={"type": "object", "additionalProperties": {"type": "string"}}),
        of(a={}),
        of(a={"type": "array"}),
        of(a={"type": "string", "pattern": "x+"}),
        of(a={"type": "integer", "minimum": 1}),
        of(a={"oneOf": [{"type": "string"}]}),
        of(a={"$ref": "elsewhere.json"}),
        of(a={"$ref": "#/$defs/missing"}),
        of(a=True),
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": 5},
        of(a={"$ref": "#/$defs/a"}) | {"$defs": {"a": of(next={"$ref": "#/$defs/a"})}},
        of(a={"$ref": "#/$defs/0"})
        | {"$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 200} for n in range(9)}},
    ],
)
def test_schema_without_a_strict_form_is_not_strict(schema: dict[str, Any]) -> None:
    assert to_strict_schema(schema, optional_as_null=True) is None
    assert to_strict_schema(schema, optional_as_null=False) is None


def test_every_tool_of_ours_can_be_strict() -> None:
    tools = [kind.tool_spec for kind in action_kinds() if hasattr(kind, "tool_spec")]
    assert len(tools) > 5
    for tool in tools:
        assert to_strict_schema(tool.parameters, optional_as_null=True) is not None, tool.name


def test_no_more_tools_are_strict_for_anthropic_than_it_takes() -> None:
    plain = ToolSpec("t", "", of(a={"type": "string"}) | {"required": ["a"]})
    assert [found is not None for found in to_strict_tools([plain] * 25)] == [True] * 20 + [False] * 5
    free = ToolSpec("t", "", of(**{f"p{n}": {"type": "string"} for n in range(10)}))
    assert [found is not None for found in to_strict_tools([free, free, free, plain])] == [True, True, False, True]
    many = ToolSpec("t", "", of(**{f"p{n}": {"type": ["string", "null"]} for n in range(9)}))
    assert [found is not None for found in to_strict_tools([many, many])] == [True, False]


def test_null_for_an_optional_field_is_omitted() -> None:
    written = {"path": "a", "mode": None, "range": None, "place": {"x": 1, "y": None}, "any": None, "other": None}
    assert remove_forced_nulls(written, EDIT) == {"path": "a", "place": {"x": 1}, "other": None}
    assert remove_forced_nulls({"path": None}, EDIT) == {"path": None}


@pytest.mark.parametrize(
    "schema",
    [{}, {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["a", None]}],
)
def test_a_null_that_means_something_stays(schema: dict[str, Any]) -> None:
    assert remove_forced_nulls({"a": None}, of(a=schema)) == {"a": None}


def test_nulls_in_lists_of_objects_are_left_out_too() -> None:
    schema = of(items={"type": "array", "items": of(id={"type": "string"}, note={"type": "string"})})
    assert remove_forced_nulls({"items": [{"id": "1", "note": None}]}, schema) == {"items": [{"id": "1"}]}


def test_a_strict_answer_fits_the_schema_it_came_from() -> None:
    answer = {"path": "a", "mode": None, "range": [1], "place": None, "any": 5}
    found = to_strict_schema(EDIT, optional_as_null=True)
    assert found is not None
    assert find_violations(answer, found) == []
    assert find_violations(remove_forced_nulls(answer, EDIT), EDIT) == []


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("object") | st.just("#/$defs/a"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "required", "items", "anyOf", "enum", "$ref", "$defs", "a", "const"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.dictionaries(st.sampled_from(["type", "properties", "required", "anyOf", "$defs", "a"]), JSON))
def test_no_schema_and_no_answer_raises(value: Any, schema: dict[str, Any]) -> None:
    for optional_as_null in (True, False):
        found = to_strict_schema({"type": "object"} | schema, optional_as_null=optional_as_null)
        assert found is None or json.dumps(found)
        to_strict_tools([ToolSpec("t", "", schema)])
    remove_forced_nulls(value, schema)
