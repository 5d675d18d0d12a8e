"""Command-line options generated from the fields of a `TaskSpec`: their names, types, choices and help.

Holds: a new field of `TaskSpec` has an option on every command that takes a task, unless `WRITTEN` or `WITHOUT` names
it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click

from broker.contract import McpAddress
from deckhands.client import TaskSpec

WRITTEN = frozenset(
    {
        *("task", "agent", "model", "workspace", "limits", "tools", "output", "images", "secrets", "labels"),
        *("not_before", "delay", "expires", "double_texting", "tenant", "experiment", "priority", "title"),
        "idempotency_key",
    }
)
"""Fields whose options are written by hand: they do not take JSON, or belong to some commands only."""
WITHOUT = frozenset({"traceparent"})
"""Fields without an option."""
SCALARS: dict[type, Any] = {str: click.STRING, int: click.INT, float: click.FLOAT}

F = TypeVar("F", bound=Callable[..., Any])


def option_of(name: str) -> Callable[[F], F]:
    """Return the option of a field: a flag, a choice, a text or a number, or several texts.

    Raises:
        TypeError: its type has no such form; define the option by hand.
    """
    field = TaskSpec.model_fields[name]
    kind = _plain(field.annotation)
    flag = f"--{name.replace('_', '-')}"
    text = field.description
    if kind is bool:
        both = f"{flag}/--no-{flag.removeprefix('--')}" if field.default else flag
        return click.option(both, is_flag=True, default=None, help=text)
    if get_origin(kind) is tuple and _plain(get_args(kind)[0]) is str:
        return click.option(flag, multiple=True, help=text)
    if get_origin(kind) is Literal:
        return click.option(flag, type=click.Choice(get_args(kind)), default=field.default, help=text)
    if kind in SCALARS:
        return click.option(flag, type=SCALARS[kind], default=field.default, help=text)
    if get_origin(kind) is dict and get_args(kind)[1] is McpAddress:
        takes = "NAME, NAME=URL, or a file of servers in the usual format. May be repeated."
        return click.option(
            flag, multiple=True, metavar="NAME[=URL]|FILE", callback=_parse_servers, help=f"{text} {takes}"
        )
    raise TypeError(f"The field {name} needs an option that is written by hand, and its name in WRITTEN.")


def add_generated_options(command: F) -> F:
    """Add the options of the fields without a hand-written one."""
    for name in reversed(TaskSpec.model_fields):
        if name not in WRITTEN | WITHOUT:
            command = option_of(name)(command)
    return command


def _parse_servers(context: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    servers: dict[str, Any] = {}
    for text in given:
        name, mark, url = text.partition("=")
        if mark or not text.endswith(".json"):
            servers[name] = {"url": url} if mark else {}
            continue
        try:
            servers |= json.loads(Path(text).read_text(encoding="utf-8"))["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise click.BadParameter(
                f'{text} is not a file of MCP servers, {{"mcpServers": {{…}}}}: {type(error).__name__}.',
                context,
                option,
            ) from error
    return servers


def _plain(annotation: Any) -> Any:
    """Return a type without `None` and without Pydantic's constraints."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _plain(parts[0]) if len(parts) == 1 else annotation
    return annotation
