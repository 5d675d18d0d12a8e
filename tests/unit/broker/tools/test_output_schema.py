"""Output schemas: the supported ones, and the errors for invalid values."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.specs import OutputSpec
from broker.runtime.errors import UsageError
from broker.tools.output_schema import check_output_schema, find_violations

SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 3},
        "people": {"type": "array", "items": {"$ref": "#/$defs/Person"}},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["count"],
    "additionalProperties": False,
    "$defs": {"Person": {"type": "object", "properties": {"name": {"minLength": 2}}, "required": ["name"]}},
}


def test_valid_output_has_no_problem() -> None:
    check_output_schema(SCHEMA)
    assert find_violations({"count": 3, "people": [{"name": "Ada"}], "colour": "red"}, SCHEMA) == []


def test_every_problem_has_its_place_and_says_what_is_wanted() -> None:
    value = {"people": [{"name": "A"}, {}, 5], "colour": "green", "extra": 1}
    assert find_violations(value, SCHEMA) == [
        "/: 'count' is missing",
        "/: 'extra' may not be there",
        '/colour: does not satisfy enum: ["red", "blue"]',
        "/people/0/name: does not satisfy minLength: 2",
        "/people/1: 'name' is missing",
        "/people/2: has to be of the type object",
    ]
    assert find_violations({"count": 1}, SCHEMA) == ["/count: does not satisfy minimum: 3"]


def test_many_problems_are_cut() -> None:
    found = find_violations({"count": 3, "people": [{}] * 12}, SCHEMA)
    assert len(found) == 11
    assert found[-1] == "and 2 more"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array"}, "is not of the type object"),
        ({}, "is not of the type object"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x"}}}, "refers to 'http://127.0.0.1:1/x'"),
        ({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}, "refers to 'file:///etc/passwd'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"type": "sum"}}}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "cannot be used"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match="The schema of the output") as error:
        check_output_schema(schema)
    assert reason in error.value.message
    assert error.value.remedy


def test_unchecked_schema_fetches_and_raises_nothing() -> None:
    (problem,) = find_violations({}, {"type": "object", "allOf": [{"$ref": "http://127.0.0.1:1/x"}]})
    assert problem.startswith("the schema cannot be used: ")


def test_no_pattern_and_no_recursion_holds_anybody_up() -> None:
    evil = {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}, "allOf": [{"$ref": "#"}]}
    check_output_schema(evil)
    assert find_violations({"a": "a" * 50_000 + "!"}, evil) == ["/a: does not satisfy pattern: ^(a+)+$"]


def test_a_schema_has_to_fit_the_event_that_holds_it() -> None:
    with pytest.raises(ValueError, match="14000 characters"):
        OutputSpec(json_schema={"type": "object", "description": "x" * 15_000})
