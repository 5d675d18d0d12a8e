"""JSON bodies whose values must have the types that the OpenAPI document promises: a string is no number.

Holds: values that Pydantic would convert, such as `"3"` to 3 or 1 to true, are refused if the schema gives another
type; the error names the place. A number without a fraction is an integer, as in JSON Schema.
Does not: check anything but types; the models do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator

Fault = tuple[tuple[str | int, ...], str, Any]
"""A place in the body, the type promised for it, and the value found there."""
CODES = {
    "integer": "int_type",
    "number": "float_type",
    "boolean": "bool_type",
    "string": "string_type",
    "array": "list_type",
    "object": "dict_type",
    "null": "none_required",
}
"""Pydantic's error code for each JSON type."""


class JsonBody(BaseModel):
    """The body of a request."""

    @model_validator(mode="wrap")
    @classmethod
    def _has_promised_types(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = handler(value)
        faults = list(_faults(_schema_of(cls), value, _schema_of(cls), ())) if isinstance(value, dict) else []
        if faults:
            details: list[Any] = [{"type": CODES[kind], "loc": place, "input": part} for place, kind, part in faults]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return found


@cache
def _schema_of(model: type[BaseModel]) -> Mapping[str, Any]:
    return model.model_json_schema()


def _faults(
    schema: Mapping[str, Any], value: Any, whole: Mapping[str, Any], place: tuple[str | int, ...]
) -> Iterator[Fault]:
    """Yield the values whose type differs from the schema.

    Args:
        whole: the root schema, with the definitions that the schema refers to.
    """
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if "discriminator" in schema and isinstance(value, dict):
        reported = schema["discriminator"]
        yield from _faults({"$ref": reported["mapping"][value[reported["propertyName"]]]}, value, whole, place)
        return
    if ways := schema.get("anyOf") or schema.get("oneOf"):
        found = [list(_faults(way, value, whole, place)) for way in ways]
        if all(found):
            # The alternative whose first fault is deepest fits best.
            yield from max(found, key=lambda faults: len(faults[0][0]))
        return
    kind = schema.get("type")
    if isinstance(kind, str) and not _has_type(kind, value):
        yield place, kind, value
    elif isinstance(value, dict):
        others = schema.get("additionalProperties")
        for name, part in value.items():
            known = schema.get("properties", {}).get(name, others)
            if isinstance(known, Mapping):
                yield from _faults(known, part, whole, (*place, name))
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for n, part in enumerate(value):
            yield from _faults(schema["items"], part, whole, (*place, n))


def _has_type(kind: str, value: Any) -> bool:
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case dict():
            return kind == "object"
        case list():
            return kind == "array"
    return True  # no JSON type
