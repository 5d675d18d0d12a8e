"""The hooks of a controller worker: those of its file (DECKHANDS_HOOKS) and those of installed packages.

    [[hook]]
    on = "before_action"
    command = ["/opt/guard/check"]      # or: python = "guard.rules:check"
    kinds = ["action.run"]              # left out: every kind
    timeout_seconds = 5                 # left out: 10

An installed package offers functions by entry points of the group `deckhands.hooks`, named after their point, such as
`before_action` or, if there are several, `before_action.guard`.

Holds: an unusable hook is refused when the worker starts, not at its first use.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import UsageError
from broker.tools import entry_points
from controller_worker.loop.hooks import Hook, HookPoint, Hooks, command_hook, function_hook

ENTRY_POINTS = "deckhands.hooks"
REMEDY = "See docs/hooks.md for what a hook looks like."


class _Entry(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid")

    on: HookPoint
    command: list[str] | None = Field(default=None, min_length=1)
    python: str | None = None
    kinds: frozenset[str] = frozenset()
    timeout_seconds: float = Field(default=10.0, gt=0)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hook: list[_Entry] = Field(default_factory=list)


def load_hooks(path: str) -> Hooks:
    """Return the hooks of a file and of installed packages, in this order.

    Args:
        path: the file; empty for none.

    Raises:
        UsageError: a hook cannot be read or found.
    """
    hooks = [_hook(entry, path) for entry in _entries(path)] if path else []
    return Hooks([*hooks, *_installed()])


def _entries(path: str) -> list[_Entry]:
    try:
        return _Table.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8"))).hook
    except OSError as error:
        raise UsageError(
            f"The file of hooks {path} cannot be read: {error.strerror}.",
            remedy="Set DECKHANDS_HOOKS to a file of hooks, or unset it.",
        ) from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UsageError(
            f"{path}: {where}: {error.errors()[0]['msg']}.", remedy=f"The points are {_points()}. {REMEDY}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}.", remedy=REMEDY) from error


def _hook(entry: _Entry, path: str) -> Hook:
    if (entry.command is None) == (entry.python is None):
        raise UsageError(f"{path}: a hook on {entry.on} needs `command` or `python`, and not both.", remedy=REMEDY)
    if entry.command is not None:
        name, ask = entry.command[0], command_hook(entry.command)
    else:
        name = entry.python or ""
        ask = function_hook(_function(name, path))
    return Hook(entry.on, name, ask, entry.timeout_seconds, entry.kinds)


def _function(reference: str, path: str) -> Callable[..., Any]:
    module, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path}: the hook {reference!r} cannot be imported: {error}.", remedy="Write module:function."
        ) from error
    return _checked(found, reference)


def _checked(found: Any, reference: str) -> Callable[..., Any]:
    if not callable(found):
        raise UsageError(f"The hook {reference!r} is a {type(found).__name__}, not a function.", remedy=REMEDY)
    function: Callable[..., Any] = found
    return function


def _installed() -> list[Hook]:
    hooks = []
    for point in entry_points(ENTRY_POINTS):
        on = point.name.partition(".")[0]
        if on not in HookPoint.__members__.values():
            raise UsageError(
                f"The package {point.dist.name if point.dist else point.value!r} has a hook on {on!r}.",
                remedy=f"The points are {_points()}.",
            )
        hooks.append(Hook(HookPoint(on), point.value, function_hook(_checked(point.load(), point.value))))
    return hooks


def _points() -> str:
    return ", ".join(HookPoint)
