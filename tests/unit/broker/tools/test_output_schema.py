"""Output schemas: the supported ones, and the errors for invalid values."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jsonschema_rs
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


def test_references_that_double_are_bounded() -> None:
    """A schema of 3 KB has 2^40 parts to check, which would hold a worker up for ever."""
    parts: dict[str, Any] = {
        f"part{number}": {"allOf": [{"$ref": f"#/$defs/part{number + 1}"}] * 2} for number in range(40)
    }
    evil = {"type": "object", "$defs": parts | {"part40": {"required": ["a"]}}, "$ref": "#/$defs/part0"}
    check_output_schema(evil)
    (problem,) = find_violations({"a": 1}, evil)
    assert problem == "the schema cannot be used: it takes more than 50,000 steps for this output"


def double(leaf: dict[str, Any], times: int) -> dict[str, Any]:
    """Return a schema that checks the property `a` by a leaf `2 ** times` times."""
    parts: dict[str, Any] = {f"p{at}": {"allOf": [{"$ref": f"#/$defs/p{at + 1}"}] * 2} for at in range(times)}
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/p0"}},
        "$defs": parts | {f"p{times}": leaf},
    }


@pytest.mark.parametrize(
    ("leaf", "times", "value"),
    [
        ({"items": {}}, 6, [1] * 30_000),
        ({"maxLength": 400_000}, 10, "x" * 300_000),
        ({"enum": [[1] * 2_000]}, 9, [1] * 2_000),
        ({"pattern": "(?:[ab]*a[ab]{900}){4}c"}, 0, "ab" * 10_000),
    ],
    ids=["items", "text", "enum", "pattern"],
)
def test_size_of_the_output_counts(leaf: dict[str, Any], times: int, value: Any) -> None:
    """Both can be forged: the schema by a tenant, and the output by the model."""
    schema = double(leaf, times)
    check_output_schema(schema)
    (problem,) = find_violations({"a": value}, schema)
    assert problem == "the schema cannot be used: it takes more than 50,000 steps for this output"


@pytest.mark.parametrize(
    "pattern", ["((a{100}){100}){101}", r"(?:\p{L}{500}){9}", "[)]{1,2000000}", "[^]a]{600000,}", "(?x)(?:a{9})\n{9}"]
)
def test_pattern_that_is_long_once_written_out_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"more than 50,000 steps|has the flag x"):
        check_output_schema({"type": "object", "patternProperties": {pattern: {}}})


def test_large_usual_output_is_checked() -> None:
    row = {"properties": {"day": {"pattern": r"^\d{4}-\d{2}-\d{2}$"}, "of": {"enum": ["a", "b"]}}, "required": ["day"]}
    schema = {"type": "object", "properties": {"rows": {"items": row, "uniqueItems": True}}}
    rows = [{"day": f"{year:04}-01-02", "of": "a"} for year in range(3_000)]
    assert find_violations({"rows": rows}, schema) == []


def test_search_ends_after_many_errors() -> None:
    found = find_violations({"a": [1] * 5_000}, {"type": "object", "properties": {"a": {"items": {"type": "string"}}}})
    assert found[-1] == "and at least 90 more"


def test_errors_do_not_hold_copies_of_the_output() -> None:
    schema = double({"type": "integer"}, 5)
    value = {"a": "x" * 1_000_000}
    find_violations(value, schema)
    tracemalloc.start()
    try:
        assert find_violations(value, schema) == ["/a: has to be of the type integer"]
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [(10**400, True), (10**400 + 1, False), (float("inf"), False)],
    ids=["even", "odd", "infinite"],
)
def test_multiple_of_a_fraction_is_decided_for_any_number(value: float, is_valid: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"multipleOf": 2.0}}}
    assert (find_violations({"a": value}, schema) == []) == is_valid


@pytest.mark.parametrize(
    ("levels", "problem"), [(10, ""), (150, "nested too deeply"), (5_000, "the output has more than 200 levels")]
)
def test_an_output_nested_deeply_is_answered(levels: int, problem: str) -> None:
    schema = {"type": "object", "additionalProperties": {"$ref": "#"}}
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    found = " ".join(find_violations(value, schema))
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize("kind", ["not", "properties"])
def test_schema_with_too_many_levels_is_refused(kind: str) -> None:
    """The deepest one that is taken is used, too, on a stack that is deep already."""

    def nest(levels: int) -> dict[str, Any]:
        inner: dict[str, Any] = {}
        for _ in range(levels):
            inner = {"not": inner} if kind == "not" else {"properties": {"a": inner}}
        return {"type": "object"} | inner

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            check_output_schema(schema)
            find_violations({"a": {"a": 1}}, schema)

    schema = nest(39 if kind == "not" else 19)
    deeper(150)
    for levels in (41, 5_000):
        with pytest.raises(UsageError, match="more than 40 levels"):
            check_output_schema(nest(levels))


def test_a_long_chain_of_references_is_answered() -> None:
    parts: dict[str, Any] = {f"p{number}": {"$ref": f"#/$defs/p{number + 1}"} for number in range(300)}
    schema = {"type": "object", "$defs": parts | {"p300": {}}, "$ref": "#/$defs/p0", "unevaluatedProperties": False}
    check_output_schema(schema)
    (problem,) = find_violations({"a": 1}, schema)
    assert problem == "the schema cannot be used: it or the output is nested too deeply"


@pytest.mark.parametrize(
    "part", [{"$id": "https://example.com/a"}, {"$schema": "http://json-schema.org/draft-07/schema#"}]
)
def test_a_part_with_an_id_or_a_dialect_is_refused(part: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="a part of it has"):
        check_output_schema({"type": "object", "properties": {"a": part}})


def test_a_pattern_that_looks_back_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a pattern in linear time"):
        check_output_schema({"type": "object", "patternProperties": {"(?=a)": {}}})


OBJECT = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": {"type": "string"}}}
TREE = {"$defs": {"tree": {"properties": {"next": {"$ref": "#/$defs/tree"}, "size": {"minimum": 1}}}}}


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (OBJECT | {"additionalProperties": False}, [{"a": 1}, {"xy": ""}, {"xy": 1}, {"yx": ""}, {"b": 1}, 5]),
        (OBJECT | {"additionalProperties": {"type": "null"}}, [{"b": None}, {"b": 1}, {"a": None}, {"x": None}]),
        (OBJECT | {"unevaluatedProperties": False}, [{"a": 1}, {"xy": "", "b": 1}, {"b": 1}, []]),
        ({"allOf": [OBJECT], "unevaluatedProperties": {"minimum": 3}}, [{"b": 3}, {"b": 2}, {"a": 1, "x": ""}]),
        ({"anyOf": [{"required": ["a"]}, OBJECT], "unevaluatedProperties": False}, [{"a": 1}, {"a": "", "b": 1}, {}]),
        ({"if": {"required": ["a"]}, "then": OBJECT, "unevaluatedProperties": False}, [{"a": 1}, {"a": 1, "b": 2}]),
        ({"dependentSchemas": {"a": OBJECT}, "unevaluatedProperties": False}, [{"a": 1}, {"b": 1}, {"a": 1, "x": ""}]),
        (
            TREE | {"$ref": "#/$defs/tree", "unevaluatedProperties": False},
            [{"next": {"size": 0}}, {"b": 1}, {"size": 2}],
        ),
        ({"anyOf": [{"type": "integer"}, {"minimum": 3}]}, [1, 2.5, 3.5, "a", 5]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}, False]}, [1, 2.5, 3.5, "a", 5]),
        ({"prefixItems": [True], "unevaluatedItems": False}, [[1], [1, 2], []]),
        ({"contains": {"type": "string"}, "unevaluatedItems": {"minimum": 2}}, [["a", 2], ["a", 1], [1]]),
        ({"uniqueItems": True}, [[1, 1.0], [1, True], [{"a": 1, "b": 2}, {"b": 2, "a": 1.0}], ["1", 1], [[], {}]]),
        ({"uniqueItems": False}, [[1, 1]]),
        ({"pattern": r"^\d+\/[\w]+$"}, ["12/ab", "٣/a", "3/é", 5]),
        ({"pattern": r"\\d"}, ["\\d", "5"]),
        ({"required": ["a", "b"]}, [{"a": 1}, {"a": 1, "b": 2}, 5]),
        ({"properties": {"a": False}}, [{"a": 1}, {"b": 1}]),
    ],
)
def test_another_implementation_agrees(part: dict[str, Any], values: list[Any]) -> None:
    """For the keywords that are bounded here."""
    schema = {"type": "object", "properties": {"value": {key: one for key, one in part.items() if key != "$defs"}}}
    schema |= {"$defs": part.get("$defs", {})}
    other = jsonschema_rs.Draft202012Validator(schema)
    check_output_schema(schema)
    for value in values:
        assert (find_violations({"value": value}, schema) == []) == other.is_valid({"value": value}), value
    assert len({other.is_valid({"value": value}) for value in values}) == 2 - (part == {"uniqueItems": False})
