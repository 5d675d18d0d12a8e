"""Validation of tool-call arguments. Error texts are for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from broker.contract.plain_json import replace_surrogates

if TYPE_CHECKING:
    from broker.contract.tool_specs import ToolSpec

MAX_INTEGER_DIGITS = 18
RISK = "security_risk"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class ToolCallError(Exception):
    """A tool call that cannot be executed; the text is for the model."""


def require(arguments: Mapping[str, Any], names: Collection[str], tool: str) -> None:
    """Check that arguments are present.

    Raises:
        ToolCallError: one is missing.
    """
    for name in names:
        if name not in arguments:
            raise ToolCallError(f'Missing required argument "{name}" in tool call {tool}')


def refuse_unknown(arguments: Mapping[str, Any], known: Collection[str], tool: str) -> None:
    """Check that a tool call has no unknown arguments.

    Raises:
        ToolCallError: there is one.
    """
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ToolCallError(
            f"Unexpected argument {unknown[0][:100]!r} in tool call {tool}. Allowed arguments are: {', '.join(known)}."
        )


def require_text(arguments: Mapping[str, Any], name: str, tool: str) -> str:
    """Return a required text.

    Raises:
        ToolCallError: it is missing or not a text.
    """
    require(arguments, (name,), tool)
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolCallError(f"Invalid argument '{name}' in tool call {tool}: Input should be a valid string.")
    return value


def parse_loose_text(value: object) -> str:
    """Return a loosely typed value as text: numbers and booleans as in JSON, null as an empty text.

    Raises:
        ValueError: the value is a list or an object.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict | tuple):
        raise ValueError("Input should be a valid string")  # noqa: TRY004  (pydantic collects ValueError)
    return "" if value is None else json.dumps(value)


def parse_message(arguments: Mapping[str, Any], name: str, tool: str) -> str:
    """Return a message from a tool call; it may be empty.

    Raises:
        ToolCallError: it is not a text, a number or a boolean.
    """
    try:
        return parse_loose_text(arguments.get(name))
    except ValueError as error:
        raise ToolCallError(f"Invalid argument '{name}' in tool call {tool}: {error}.") from error


def parse_optional_text(arguments: Mapping[str, Any], name: str, tool: str, default: str) -> str:
    """Return a text, or the default if it is missing, null or empty.

    Raises:
        ToolCallError: it is not a text.
    """
    return require_text(arguments, name, tool) or default if arguments.get(name) is not None else default


def parse_optional_name(arguments: Mapping[str, Any], name: str, tool: str) -> str | None:
    """Return a name of up to 32 letters, digits, dots, hyphens and underscores; None if it is missing or empty.

    Raises:
        ToolCallError: it is not such a name.
    """
    value = arguments.get(name) or None
    if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
        raise ToolCallError(
            f"Invalid argument '{name}' in tool call {tool}: a name has up to 32 letters, digits, `.`, `-` and `_`."
        )
    return value


def parse_arguments(tool: ToolSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the names of a call's arguments and return them. A risk estimate is converted to its number.

    Raises:
        ToolCallError: an argument is missing or unknown.
    """
    known = tool.parameters.get("properties", {})
    require(arguments, [name for name in tool.parameters.get("required", ()) if name != RISK], tool.name)
    refuse_unknown(arguments, known, tool.name)
    return {**arguments, RISK: parse_risk(arguments)} if RISK in known else dict(arguments)


def parse_risk(arguments: Mapping[str, Any]) -> int:
    """Return the model's own estimate of the risk; unknown if it is missing or invalid (OpenHands 9.1)."""
    named = {"LOW": 0, "MEDIUM": 1, "HIGH": 2}
    risk = arguments.get(RISK)
    return named.get(risk, -1) if isinstance(risk, str) else -1


def parse_seconds(arguments: Mapping[str, Any], name: str) -> float | None:
    """Return a number of seconds; None if it is missing.

    Raises:
        ToolCallError: it is not a positive number.
    """
    value = arguments.get(name)
    if value is None:
        return None
    try:
        seconds = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError as error:
        raise ToolCallError(f"Invalid float passed to '{name}' argument: {value[:100]!r}.") from error
    if not 0 < seconds < float("inf"):
        raise ToolCallError(f"'{name}' must be a positive number of seconds.")
    return seconds


def parse_json(text: str) -> Any:
    """Parse JSON that a model wrote.

    Raises:
        ValueError, RecursionError: it is not JSON, or too large or too deep for the log.
    """
    return replace_surrogates(json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_integer))


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:  # beyond the log's 64-bit integers
        raise ValueError(f"the integer {digits[:20]}… is too large")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
