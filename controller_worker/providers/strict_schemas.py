"""Converts schemas to the strict form that providers can enforce, and converts strict answers back.

A strict tool or output supports only a part of JSON Schema: objects with all properties listed, arrays with items,
choices, texts and numbers. OpenAI requires every property, so an optional property becomes nullable. Anthropic accepts
optional properties.

`Strictness` decides whether a client's calls use strict schemas, and falls back if the provider refuses them.

Holds: a schema that has no strict form stays unchanged, and its tool is not strict. `remove_forced_nulls` converts the
added nulls back, for every model. A request refused as invalid is sent once more without strict schemas. If that
succeeds, all later requests of the client are not strict. A batched call is never strict, because its refusal comes
hours later.
Does not: convert bounds, patterns and formats, because providers handle them differently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from broker.contract import ToolSpec
from controller_worker.providers.config import LLMConfig, Toggle
from controller_worker.providers.errors import BadRequestError
from controller_worker.providers.llm import ModelRequest

KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"})
NOTES = frozenset({"title", "default", "examples", "description", "$defs", "$schema"})
"""Keywords that constrain nothing; only the description is sent."""
LOCAL = "#/$defs/"
DEPTH_LIMIT = 5
"""OpenAI's limit. A reference counts as a level, so a recursive schema is too deep."""
PARTS_LIMIT = 500
"""Limits the size after references are replaced; nested references can multiply it."""

Schema = Mapping[str, Any]


class _NoStrictForm(Exception):
    """A part of a schema has no strict form."""


def to_strict_schema(schema: Schema, *, optional_as_null: bool) -> dict[str, Any] | None:
    """Return the strict form of an object schema for a tool or an output; None if it has none.

    Args:
        optional_as_null: make every property required, and optional ones nullable.
    """
    text = _write_strict(json.dumps(schema), optional_as_null)
    found: dict[str, Any] | None = None if text is None else json.loads(text)
    return found


def to_strict_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any] | None]:
    """Return for each tool the schema that Anthropic gets with `strict`; None if the tool is not strict.

    A request has limits: 20 tools, 24 optional properties and 16 properties with several types, by
    https://platform.claude.com/docs/en/build-with-claude/structured-outputs.
    """
    left = [20, 24, 16]
    found: list[dict[str, Any] | None] = []
    for tool in tools:
        schema = to_strict_schema(tool.parameters, optional_as_null=False)
        costs = [1, *_count_freedom(schema)] if schema is not None else []
        if schema is None or any(cost > rest for cost, rest in zip(costs, left, strict=True)):
            found.append(None)
            continue
        left = [rest - cost for cost, rest in zip(costs, left, strict=True)]
        found.append(schema)
    return found


def remove_forced_nulls(value: Any, schema: Schema) -> Any:
    """Return a model's arguments without the nulls that stand for omitted properties.

    Args:
        schema: the schema of the tool or output, before `to_strict_schema`; may be any JSON.
    """
    try:
        return _remove_nulls(value, schema, schema, 0)
    except (TypeError, AttributeError):
        return value


def _remove_nulls(value: Any, schema: Any, root: Schema, depth: int) -> Any:
    schema = _resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > DEPTH_LIMIT:
        return value
    if isinstance(value, list):
        return [_remove_nulls(item, schema.get("items"), root, depth + 1) for item in value]
    properties = schema.get("properties")
    required = schema.get("required") or ()
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    return {
        name: _remove_nulls(part, properties.get(name), root, depth + 1)
        for name, part in value.items()
        if part is not None or name in required or name not in properties or _accepts_null(properties[name], root)
    }


@lru_cache(maxsize=512)
def _write_strict(text: str, optional_as_null: bool) -> str | None:
    schema = json.loads(text)
    if not isinstance(schema.get("$defs") or {}, Mapping) or schema.get("type") != "object":
        return None
    try:
        return json.dumps(_Writer(schema.get("$defs") or {}, optional_as_null=optional_as_null).strict(schema, 0))
    except (_NoStrictForm, TypeError, AttributeError):
        return None


class _Writer:
    """Converts one schema. References are replaced by their targets."""

    def __init__(self, definitions: Schema, *, optional_as_null: bool) -> None:
        self._definitions = definitions
        self._optional_as_null = optional_as_null
        self._parts = 0

    def strict(self, schema: Any, depth: int) -> dict[str, Any]:
        """Convert a part.

        Raises:
            _Inexpressible: the part has no strict form, or the whole would be too deep or too large.
        """
        self._parts += 1
        if not isinstance(schema, Mapping) or depth > DEPTH_LIMIT or self._parts > PARTS_LIMIT:
            raise _NoStrictForm
        if "$ref" in schema:
            name = str(schema["$ref"])
            return self.strict(self._definitions.get(name.removeprefix(LOCAL)) if LOCAL in name else None, depth + 1)
        if set(schema) - KEYWORDS - NOTES:
            raise _NoStrictForm
        found: dict[str, Any] = {
            name: schema[name] for name in ("type", "description", "enum", "const") if name in schema
        }
        types = _types(schema)
        if "anyOf" in schema:
            found["anyOf"] = [self.strict(choice, depth + 1) for choice in schema["anyOf"]]
        elif not types and not {"enum", "const"} & set(schema):
            raise _NoStrictForm
        if "array" in types:
            found["items"] = self.strict(schema.get("items"), depth + 1)
        return found | self._object(schema, depth) if "object" in types else found

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if schema.get("additionalProperties", False) is not False or (depth and not properties):
            raise _NoStrictForm
        written = {name: self.strict(part, depth + 1) for name, part in properties.items()}
        names = [name for name in written if self._optional_as_null or name in required]
        if self._optional_as_null:
            written = {name: part if name in required else _nullable(part) for name, part in written.items()}
        return {"properties": written, "required": names, "additionalProperties": False}


def _types(schema: Schema) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "const" in schema or not _types(schema):
        return {"anyOf": [schema, {"type": "null"}]}
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema and None not in schema["enum"] else {}
    return schema | {"type": list(dict.fromkeys([*_types(schema), "null"]))} | choices


def _count_freedom(schema: Schema) -> tuple[int, int]:
    """Return the number of optional properties and the number of parts with several types."""
    properties = schema.get("properties") or {}
    optional = len(properties) - len(schema.get("required") or ())
    several = int("anyOf" in schema or len(_types(schema)) > 1)
    for part in (*properties.values(), *schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        further = _count_freedom(part)
        optional = optional + further[0]
        several = several + further[1]
    return optional, several


def _resolve(schema: Any, root: Schema) -> Any:
    """Return the target of a reference within the schema; return any other part unchanged."""
    for _ in range(DEPTH_LIMIT):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            return schema
        schema = (root.get("$defs") or {}).get(ref.removeprefix(LOCAL)) if ref.startswith(LOCAL) else None
    return None


def _accepts_null(schema: Any, root: Schema) -> bool:
    """Return whether a schema accepts null; True if unknown. Otherwise a null in a call means an argument left out."""
    schema = _resolve(schema, root)
    if not isinstance(schema, Mapping):
        return True
    choices = [_resolve(choice, root) for name in ("anyOf", "oneOf") for choice in schema.get(name) or ()]
    if choices:
        return any(not _types(choice) or "null" in _types(choice) for choice in choices)
    if "enum" in schema:
        return None in schema["enum"]
    if "const" in schema:
        return schema["const"] is None
    return "null" in _types(schema) or not _types(schema)


Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Strict:
    """The strict parts of one call: its tools, and the schema of a text reply (None for none)."""

    tools: bool = False
    output: Mapping[str, Any] | None = None


LOOSE = Strict()


class Strictness:
    """The strictness of one client's calls."""

    def __init__(self, config: LLMConfig, *, is_known: bool) -> None:
        """Read the settings; `is_known` means that the table lists the model as supporting strict schemas."""
        self._model = config.model
        self._tools = _is_wanted(config.strict_tools, is_known=is_known)
        chosen = config.completion_kwargs or {}
        form = chosen.get("output_config")
        has_form = "response_format" in chosen or (isinstance(form, dict) and "format" in form)
        self._output = _is_wanted(config.structured_output, is_known=is_known) and not has_form

    def of(self, request: ModelRequest) -> Strict:
        """Return the strict parts of a call."""
        if request.carry is not None:
            return LOOSE
        return Strict(self._tools and bool(request.tools), request.output_schema if self._output else None)

    async def ask(self, request: ModelRequest, ask: Callable[[Strict], Awaitable[Answer]]) -> Answer:
        """Call `ask` with strict schemas, if wanted, and without them if refused. Raises the same errors as `ask`."""
        strict = self.of(request)
        if strict == LOOSE:
            return await ask(strict)
        try:
            return await ask(strict)
        except BadRequestError as error:
            refusal = error
        answer = await ask(LOOSE)
        self._tools = self._output = False
        _log.warning("%s does not accept strict schemas; they are no longer sent: %s", self._model, refusal)
        return answer


def _is_wanted(wish: Toggle, *, is_known: bool) -> bool:
    return wish == "on" or (wish == "auto" and is_known)
