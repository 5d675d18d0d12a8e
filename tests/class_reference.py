"""The data of a class for the reference pages: the text of each field, its type and its default, as Markdown."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

NAMES: Mapping[object, str] = {
    str: "text",
    Path: "path",
    SecretStr: "text",
    bool: "`1` or `0`",
    int: "whole number",
    float: "number",
    datetime: "time",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; `|` in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def first_sentences(owner: type) -> str:
    """Return the first paragraph of a class's docstring, on one line."""
    return _plain(inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0])


def attributes(owner: type) -> dict[str, str]:
    """Return the description of each attribute in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        _, _, listed = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", "\n" + listed.split("\n\n")[0])[1:]:
            names, _, text = entry.partition(":")
            found |= dict.fromkeys(re.split(r",\s*", names.strip()), _plain(text).removesuffix("."))
    return found


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def shown_type(annotation: Any, names: Mapping[object, str] = NAMES) -> str:
    """Return a type in words; None is left out, because the default shows it."""
    if annotation in names:
        return names[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shown_type(parts[0], names)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(shown_type(part, names) for part in parts if part is not type(None)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "table"
    if isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet):
        inner = [part for part in parts if part is not ...]
        return "list" + (f" of {shown_type(inner[0], names)}" if len(inner) == 1 else "")
    if isinstance(annotation, type) and issubclass(annotation, Enum | BaseModel):
        return f"[`{annotation.__name__}`](#{annotation.__name__.lower()})"
    return "any value"


def types_in(annotation: Any) -> Iterator[type]:
    """Yield our own types that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Enum | BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


def shown_default(field: FieldInfo, true: str = "1") -> str:
    """Return the default of a field; empty if there is none, or if it is empty or false."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default is False or (not isinstance(default, int | float) and not default):
        return ""
    if isinstance(default, bool):
        return f"`{true}`"
    if isinstance(default, BaseModel):
        return ""
    shown = default.value if isinstance(default, Enum) else default
    if isinstance(shown, tuple | Mapping):
        return f"`{json.dumps(to_jsonable_python(shown))}`"
    return f"`{shown:.10g}`" if isinstance(shown, float) else f"`{shown}`"
