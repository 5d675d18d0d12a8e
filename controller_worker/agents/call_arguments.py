"""The arguments of a tool call, checked; what is wrong with one is said in words for the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class ToolCallError(Exception):
    """A tool call that cannot be carried out; the text is for the model."""


def require(arguments: Mapping[str, Any], names: Collection[str], tool: str) -> None:
    """Make sure that arguments are there.

    Raises:
        ToolCallError: one is missing.
    """
    for name in names:
        if name not in arguments:
            raise ToolCallError(f'Missing required argument "{name}" in tool call {tool}')


def refuse_unknown(arguments: Mapping[str, Any], known: Collection[str], tool: str) -> None:
    """Make sure that there are no other arguments than those that a tool has.

    Raises:
        ToolCallError: there is one.
    """
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ToolCallError(
            f"Unexpected argument {unknown[0][:100]!r} in tool call {tool}. Allowed arguments are: {', '.join(known)}."
        )


def required_text(arguments: Mapping[str, Any], name: str, tool: str) -> str:
    """Return a text that has to be there.

    Raises:
        ToolCallError: it is missing, or no text.
    """
    require(arguments, (name,), tool)
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolCallError(f"Invalid argument '{name}' in tool call {tool}: Input should be a valid string.")
    return value


def optional_text(arguments: Mapping[str, Any], name: str, tool: str, default: str) -> str:
    """Return a text; the default where it is missing, null or empty.

    Raises:
        ToolCallError: it is something else than text.
    """
    return required_text(arguments, name, tool) or default if arguments.get(name) is not None else default
