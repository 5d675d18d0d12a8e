"""Types of settings with bounds, and the conversion of a setting's text. Imports pydantic, which texts do not need."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from broker.runtime.errors import UsageError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def resolve_setting_types(owner: type) -> dict[str, Any]:
    """Return the type of each setting of a class with its metadata, inherited settings first."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        names = {**vars(sys.modules[base.__module__]), "Field": Field}
        own = dict(vars(base).get("__annotations__", {}))
        holder = type(base.__name__, (), {"__annotations__": own})
        found |= get_type_hints(holder, globalns=names, include_extras=True)
    return found


def convert_setting(owner: type, name: str, text: str, variable: str) -> Any:
    """Return the value of a setting.

    Args:
        variable: its name in the environment, for the error.

    Raises:
        UsageError: the text is invalid.
    """
    try:
        return TypeAdapter(resolve_setting_types(owner)[name]).validate_python(text.strip())
    except ValidationError as error:
        raise _make_usage_error(variable, error) from error


def parse_flag(variable: str, text: str) -> bool:
    """Return the value of a variable that is on or off.

    Raises:
        UsageError: it is neither.
    """
    try:
        return TypeAdapter(bool).validate_python(text)
    except ValidationError:
        raise UsageError(f"{variable} is {ascii(text)[:100]}.", remedy="Use 1 or 0.") from None


def _make_usage_error(variable: str, error: ValidationError) -> UsageError:
    """Return the error for an invalid value, with its variable."""
    first = error.errors()[0]
    found, limits = first["input"], first.get("ctx", {})
    if first["type"] == "literal_error":
        return UsageError(f"{variable} is {found!r}.", remedy=f"Use {limits['expected'].replace(chr(39), '')}.")
    if first["type"] == "bool_parsing":
        return UsageError(f"{variable} is {found!r}.", remedy="Use 1 or 0.")
    if variable.endswith("_SHARDS") and limits.keys() & {"ge", "le"}:
        return UsageError(f"{variable} is {found}.", remedy="Use 1 to 1024.")
    if "ge" in limits:
        return UsageError(f"{variable} is {found}.", remedy=f"It must be {limits['ge']:g} or more.")
    return UsageError(f"{variable} is {found!r}.", remedy="It must be a number.")
