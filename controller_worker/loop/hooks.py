"""Hooks: the operator's code around model calls, actions, observations and finishes.

A hook is a Python function or a command. It receives the call or event as JSON values; a hook that runs before it can
veto it. A veto is recorded like any other outcome (an error observation, a refused finish, a failed call), so the log
and its replay need no hooks. The hooks of a controller worker are those of its file (DECKHANDS_HOOKS) and those of
installed packages:

    [[hook]]
    on = "before_action"
    command = ["/opt/guard/check"]      # or: python = "guard.rules:check"
    kinds = ["action.run"]              # left out: every kind
    timeout_seconds = 5                 # left out: 10

An installed package offers functions by entry points of the group `deckhands.hooks`, named after their point, such as
`before_action` or, if there are several, `before_action.guard`.

Holds: an unusable hook is refused when the worker starts, not at its first use. A `before_` hook that fails or times
out vetoes; the failure of an `after_` hook is only logged. While a hook runs, the worker continues with other
conversations. Hooks come from the worker's own configuration, never from a workspace or a conversation.
Does not: call a hook exactly once. After a crash, or after a message in between, a call can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import os
import signal
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.contract import (
    Action,
    AgentFinishAction,
    ErrorObservation,
    Event,
    FinishRefusedObservation,
    ModelReply,
    Observation,
)
from broker.runtime import DeckhandsError, UsageError
from broker.tools import entry_points
from controller_worker.core import Append, State
from controller_worker.providers import HookVeto

VETO_EXIT_CODE = 2
MAX_REASON_CHARS = 2_000
KILL_WAIT_SECONDS = 1.0
"""How long to wait for the end of a killed command."""
ERROR_ID = "AGENT_ERROR$HOOK_VETO"
ENTRY_POINTS = "deckhands.hooks"
REMEDY = "See docs/security.md#hooks for the format of a hook."

_log = logging.getLogger(__name__)

HookFunction = Callable[[Mapping[str, Any]], str | Awaitable[str | None] | None]
"""Takes a call or event; returns the reason for a veto, or None. Synchronous ones run in a thread."""


class HookPoint(StrEnum):
    """When a hook is called."""

    BEFORE_MODEL = "before_model"
    AFTER_MODEL = "after_model"
    BEFORE_ACTION = "before_action"
    BEFORE_FINISH = "before_finish"
    AFTER_OBSERVATION = "after_observation"


MAY_VETO = frozenset({HookPoint.BEFORE_MODEL, HookPoint.BEFORE_ACTION, HookPoint.BEFORE_FINISH})


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook.

    Attributes:
        name: the function or command, for logs and messages.
        ask: returns the reason for a veto, or None; raises on failure.
        kinds: kinds of events to call it for; empty for all.
    """

    point: HookPoint
    name: str
    ask: Callable[[Mapping[str, Any]], Awaitable[str | None]]
    timeout_seconds: float = 10.0
    kinds: frozenset[str] = frozenset()


class Hooks:
    """The hooks of a worker."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks: dict[HookPoint, list[Hook]] = {}
        for hook in hooks:
            self._hooks.setdefault(hook.point, []).append(hook)
        self._notifying: set[asyncio.Task[str | None]] = set()

    async def admit(self, state: State, service: str, model: str) -> None:
        """Ask whether a model call is allowed.

        Raises:
            HookVeto: a hook refuses it.
        """
        if HookPoint.BEFORE_MODEL in self._hooks:
            reason = await self._find_veto(HookPoint.BEFORE_MODEL, state, {"model": model, "service": service})
            if reason is not None:
                raise HookVeto(reason, remedy="Ask the operator of the controller workers.")

    async def review(self, state: State, events: Sequence[Event]) -> Append:
        """Return the events of a turn, or an edited action, followed by the events that settle vetoed actions."""
        if not self._hooks:
            return Append(tuple(events))
        outcomes: list[Event] = []
        answers: list[tuple[int, int]] = []
        for number, event in enumerate(events, state.version + 1):
            if isinstance(event, ModelReply):
                self._notify(HookPoint.AFTER_MODEL, state, event)
            point = _find_point(event)
            reason = None if point is None else await self._find_veto(point, state, _to_json(event, number))
            if reason is None:
                continue
            if isinstance(event, AgentFinishAction):
                outcomes.append(
                    FinishRefusedObservation(content=f"Your finish was not accepted: {reason}", reason="hook")
                )
                continue
            answers.append((len(events) + len(outcomes), number))
            outcomes.append(
                ErrorObservation(
                    content=f"The action was not carried out: {reason}",
                    error_id=ERROR_ID,
                    cause=number,
                    tool_call_metadata=event.tool_call_metadata,
                )
            )
        return Append((*events, *outcomes), tuple(answers))

    def observe(self, state: State, events: Iterable[Event]) -> None:
        """Call hooks for the observations that were folded in; nothing waits for these hooks or depends on them."""
        if HookPoint.AFTER_OBSERVATION in self._hooks:
            for event in events:
                if isinstance(event, Observation):
                    self._notify(HookPoint.AFTER_OBSERVATION, state, event)

    async def aclose(self) -> None:
        """Wait for running hooks."""
        await asyncio.gather(*self._notifying, return_exceptions=True)

    def _notify(self, point: HookPoint, state: State, event: Event) -> None:
        if point in self._hooks:
            task = asyncio.create_task(self._find_veto(point, state, _to_json(event, event.id)))
            self._notifying.add(task)
            task.add_done_callback(self._notifying.discard)

    async def _find_veto(self, point: HookPoint, state: State, about: Mapping[str, Any]) -> str | None:
        """Return the reason of the first veto, or None; hooks are asked in their order."""
        event = about.get("event") or {}
        for hook in self._hooks.get(point, ()):
            if hook.kinds and event.get("kind") not in hook.kinds:
                continue
            reported = {
                "point": point.value,
                "conversation_id": state.setup.conversation_id,
                "iteration": state.usage.iteration,
                **about,
            }
            reason = await _ask(hook, reported)
            if reason is not None and point in MAY_VETO:
                return reason[:MAX_REASON_CHARS]
        return None


async def _ask(hook: Hook, told: Mapping[str, Any]) -> str | None:
    limit = asyncio.timeout(hook.timeout_seconds)
    try:
        async with limit:
            return await hook.ask(told)
    except Exception as error:  # noqa: BLE001  (code of the operator)
        if limit.expired():
            _log.warning("the hook %s did not answer within %g s", hook.name, hook.timeout_seconds)
            return f"the hook {hook.name} did not answer in time"
        _log.exception("the hook %s failed", hook.name)
        return f"the hook {hook.name} failed: {_render_cause(error)}"


def _render_cause(error: BaseException) -> str:
    """Return the text of an error and of its causes."""
    said = str(error).strip()
    found = said if isinstance(error, DeckhandsError) else ": ".join(filter(None, (type(error).__name__, said)))
    return f"{found} (caused by {_render_cause(error.__cause__)})" if error.__cause__ is not None else found


def _find_point(event: Event) -> HookPoint | None:
    if isinstance(event, AgentFinishAction):
        return HookPoint.BEFORE_FINISH
    return HookPoint.BEFORE_ACTION if isinstance(event, Action) and event.runnable else None


def _to_json(event: Event, event_id: int) -> dict[str, Any]:
    return {"event": event.export() | {"id": event_id}}


def make_function_ask(function: HookFunction) -> Callable[[Mapping[str, Any]], Awaitable[str | None]]:
    """Return the `ask` function for a Python function."""
    if inspect.iscoroutinefunction(function):
        return function

    async def ask(told: Mapping[str, Any]) -> str | None:
        answer = await asyncio.to_thread(function, told)
        return await answer if inspect.isawaitable(answer) else answer

    return ask


def _render_status(status: int | None) -> str:
    return f"{status}" if status is None or status >= 0 else f"the signal {signal.Signals(-status).name}"


def make_command_ask(command: Sequence[str]) -> Callable[[Mapping[str, Any]], Awaitable[str | None]]:
    """Return an `ask` function that runs a command on JSON. Exit code 2 is a veto; its reason is the standard error."""

    async def ask(told: Mapping[str, Any]) -> str | None:
        with tempfile.TemporaryFile() as printed:  # processes that the command leaves behind could hold a pipe open
            status, errors = await _run_to_end(command, json.dumps(told).encode(), printed)
            printed.seek(0)
            text = (errors.strip() or printed.read(4 * MAX_REASON_CHARS).strip()).decode(errors="replace")
        if status == VETO_EXIT_CODE:
            return text or f"the hook {command[0]} refused it"
        if status != 0:
            raise DeckhandsError(f"it ended with {_render_status(status)}: {text or 'it wrote nothing'}")
        return None

    return ask


async def _run_to_end(command: Sequence[str], told: bytes, printed: IO[bytes]) -> tuple[int | None, bytes]:
    """Run a command to its end and return its status and its standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=printed, stderr=pipe, start_new_session=True
    )
    try:
        _, errors = await process.communicate(told)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group includes child processes, which nothing else would end
        with contextlib.suppress(TimeoutError):  # a process that has left the group may hold the pipe open
            await asyncio.wait_for(process.wait(), KILL_WAIT_SECONDS)
        raise
    return process.returncode, errors


class _HookEntry(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid")

    on: HookPoint
    command: list[str] | None = Field(default=None, min_length=1)
    python: str | None = None
    kinds: frozenset[str] = frozenset()
    timeout_seconds: float = Field(default=10.0, gt=0)


class _HookTable(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hook: list[_HookEntry] = Field(default_factory=list)


def load_hooks(path: str) -> Hooks:
    """Return the hooks of a file and of installed packages, in this order.

    Args:
        path: the file; empty for none.

    Raises:
        UsageError: a hook cannot be read or found.
    """
    hooks = [_make_hook(entry, path) for entry in _read_entries(path)] if path else []
    return Hooks([*hooks, *_load_installed()])


def _read_entries(path: str) -> list[_HookEntry]:
    try:
        return _HookTable.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8"))).hook
    except OSError as error:
        raise UsageError(
            f"The file of hooks {path} cannot be read: {error.strerror}.",
            remedy="Set DECKHANDS_HOOKS to a file of hooks, or unset it.",
        ) from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UsageError(
            f"{path}: {where}: {error.errors()[0]['msg']}.", remedy=f"The points are {_render_points()}. {REMEDY}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}.", remedy=REMEDY) from error


def _make_hook(entry: _HookEntry, path: str) -> Hook:
    if (entry.command is None) == (entry.python is None):
        raise UsageError(f"{path}: a hook on {entry.on} needs `command` or `python`, and not both.", remedy=REMEDY)
    if entry.command is not None:
        name = entry.command[0]
        ask = make_command_ask(entry.command)
    else:
        name = entry.python or ""
        ask = make_function_ask(_import_function(name, path))
    return Hook(entry.on, name, ask, entry.timeout_seconds, entry.kinds)


def _import_function(reference: str, path: str) -> Callable[..., Any]:
    module, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path}: the hook {reference!r} cannot be imported: {error}.", remedy="Write module:function."
        ) from error
    return _check_function(found, reference)


def _check_function(found: Any, reference: str) -> Callable[..., Any]:
    if not callable(found):
        raise UsageError(f"The hook {reference!r} is a {type(found).__name__}, not a function.", remedy=REMEDY)
    function: Callable[..., Any] = found
    return function


def _load_installed() -> list[Hook]:
    hooks = []
    for point in entry_points(ENTRY_POINTS):
        on = point.name.partition(".")[0]
        if on not in HookPoint.__members__.values():
            raise UsageError(
                f"The package {point.dist.name if point.dist else point.value!r} has a hook on {on!r}.",
                remedy=f"The points are {_render_points()}.",
            )
        hooks.append(Hook(HookPoint(on), point.value, make_function_ask(_check_function(point.load(), point.value))))
    return hooks


def _render_points() -> str:
    return ", ".join(HookPoint)
