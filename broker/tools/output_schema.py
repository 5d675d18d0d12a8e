"""Validates the structured output of an agent against a JSON Schema (2020-12).

Holds: a pure function of schema and value. References outside the schema are never fetched. Patterns match in linear
time, so no schema can block a worker. The error texts are ours, so a replay with another version of the library gives
the same texts.
Does not: check `format`, which is optional in JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from broker.runtime import UsageError

if TYPE_CHECKING:
    import jsonschema_rs

MAX_VIOLATIONS = 10
MAX_SHOWN_CHARS = 300
LOCAL_REFERENCES = ("$ref", "$dynamicRef")


def check_output_schema(schema: Mapping[str, Any]) -> None:
    """Check that a schema can be used for validation.

    Raises:
        UsageError: it is not a JSON Schema, has external references, or does not describe an object.
    """
    remedy = "Write a JSON Schema (2020-12) of the type object that refers to nothing outside of itself."
    if schema.get("type") != "object":
        raise UsageError("The schema of the output is not of the type object.", remedy=remedy)
    outside = next((ref for ref in _find_references(schema) if not ref.startswith("#")), None)
    if outside is not None:
        raise UsageError(f"The schema of the output refers to {outside!r}.", remedy=remedy)
    try:
        _build_validator(schema)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"The schema of the output cannot be used: {reason}", remedy=remedy) from error


def find_violations(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return the violations of a schema as texts for a model, sorted by location; empty if the value is valid.

    An invalid schema is reported as a violation, too.
    """
    try:
        found = list(_build_validator(schema).iter_errors(value))
    except ValueError as error:
        return [f"the schema cannot be used: {str(error).partition(chr(10))[0]}"]
    problems = sorted(
        {("/" + "/".join(map(str, error.instance_path)), _describe_violation(error, schema)) for error in found}
    )
    shown = [f"{place}: {words}" for place, words in problems[:MAX_VIOLATIONS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {left} more"] if left else shown


def _build_validator(schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
    import jsonschema_rs

    # Another dialect could not be fetched.
    local = {name: part for name, part in schema.items() if name != "$schema"}
    return jsonschema_rs.Draft202012Validator(
        local, pattern_options=jsonschema_rs.RegexOptions(), retriever=_refuse_retrieval, validate_formats=False
    )


def _refuse_retrieval(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")


def _find_references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name in LOCAL_REFERENCES and isinstance(part, str):
                yield part
            yield from _find_references(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_references(part)


def _describe_violation(error: jsonschema_rs.ValidationError, schema: Mapping[str, Any]) -> str:
    path = error.schema_path
    keyword = str(path[-1]) if path else ""
    match keyword:
        case "required":
            return f"{getattr(error.kind, 'property', '')!r} is missing"
        case "additionalProperties" | "unevaluatedProperties":
            names = ", ".join(repr(name) for name in getattr(error.kind, "unexpected", ()))
            return f"{names} may not be there"[:MAX_SHOWN_CHARS]
        case "type":
            return f"has to be of the type {_render_schema_at(schema, path)}"
    return f"does not satisfy {keyword}: {_render_schema_at(schema, path)}"


def _render_schema_at(schema: Any, path: Sequence[str | int]) -> str:
    """Return the part of a schema at a path as text, shortened."""
    for part in path:
        try:
            schema = schema[part]
        except (LookupError, TypeError):
            return ""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
