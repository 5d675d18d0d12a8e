"""The arguments of a tool call, checked; what is wrong with one is said in words for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ToolCallError(Exception):
    """A tool call that cannot be carried out; the text is for the model."""


def required_text(arguments: Mapping[str, Any], name: str, tool: str) -> str:
    """Return a text that has to be there.

    Raises:
        ToolCallError: it is missing, or no text.
    """
    if name not in arguments:
        raise ToolCallError(f'Missing required argument "{name}" in tool call {tool}')
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
