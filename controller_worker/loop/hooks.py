"""Hooks: the operator's code around model calls, actions, observations and finishes.

A hook is a Python function or a command. It receives the call or event as JSON values; a hook that runs before it can
veto it. A veto is recorded like any other outcome (an error observation, a refused finish, a failed call), so the log
and its replay need no hooks.

Holds: a hook that fails or times out vetoes if it runs before something, and is only logged if it runs after it. The
worker's loop steps other conversations while a hook runs. Hooks come from the worker's own configuration, never from a
workspace or a conversation.
Does not: ask exactly once. After a crash, or after a message in between, a question can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

from broker.contract import (
    Action,
    AgentFinishAction,
    ErrorObservation,
    Event,
    FinishRefusedObservation,
    ModelReply,
    Observation,
)
from broker.runtime import DeckhandsError
from controller_worker.core import Append, State
from controller_worker.providers import HookVeto

VETO_EXIT_CODE = 2
MAX_REASON_CHARS = 2_000
LAST_WORDS_SECONDS = 1.0
"""How long to wait for the end of a killed command."""
ERROR_ID = "AGENT_ERROR$HOOK_VETO"

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
        name: of the function or the command, for logs and messages.
        ask: returns the reason for a veto, or None; raises on failure.
        kinds: of events that it is called for; empty for all.
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
        self._telling: set[asyncio.Task[None]] = set()

    async def admit(self, state: State, service: str, model: str) -> None:
        """Ask whether a model call is allowed.

        Raises:
            HookVeto: a hook refuses it.
        """
        if HookPoint.BEFORE_MODEL in self._hooks:
            reason = await self._veto(HookPoint.BEFORE_MODEL, state, {"model": model, "service": service})
            if reason is not None:
                raise HookVeto(reason, remedy="Ask the operator of the controller workers.")

    async def reviewed(self, state: State, events: Sequence[Event]) -> Append:
        """Return the events of a turn, or an edited action, followed by the events that settle vetoed ones."""
        if not self._hooks:
            return Append(tuple(events))
        outcomes: list[Event] = []
        answers: list[tuple[int, int]] = []
        for number, event in enumerate(events, state.version + 1):
            if isinstance(event, ModelReply):
                self._tell(HookPoint.AFTER_MODEL, state, event)
            point = _point_of(event)
            reason = None if point is None else await self._veto(point, state, _about(event, number))
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
                    self._tell(HookPoint.AFTER_OBSERVATION, state, event)

    async def aclose(self) -> None:
        """Wait for running hooks."""
        await asyncio.gather(*self._telling, return_exceptions=True)

    def _tell(self, point: HookPoint, state: State, event: Event) -> None:
        if point in self._hooks:
            task = asyncio.create_task(self._told(point, state, _about(event, event.id)))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _told(self, point: HookPoint, state: State, about: Mapping[str, Any]) -> None:
        await self._veto(point, state, about)

    async def _veto(self, point: HookPoint, state: State, about: Mapping[str, Any]) -> str | None:
        """Return the reason of the first veto, or None; hooks are asked in their order."""
        event = about.get("event") or {}
        for hook in self._hooks.get(point, ()):
            if hook.kinds and event.get("kind") not in hook.kinds:
                continue
            told = {
                "point": point.value,
                "conversation_id": state.setup.conversation_id,
                "iteration": state.usage.iteration,
                **about,
            }
            reason = await _asked(hook, told)
            if reason is not None and point in MAY_VETO:
                return reason[:MAX_REASON_CHARS]
        return None


async def _asked(hook: Hook, told: Mapping[str, Any]) -> str | None:
    limit = asyncio.timeout(hook.timeout_seconds)
    try:
        async with limit:
            return await hook.ask(told)
    except Exception as error:  # noqa: BLE001  (somebody else's code)
        if limit.expired():
            _log.warning("the hook %s did not answer within %g s", hook.name, hook.timeout_seconds)
            return f"the hook {hook.name} did not answer in time"
        _log.exception("the hook %s failed", hook.name)
        return f"the hook {hook.name} failed: {_cause(error)}"


def _cause(error: BaseException) -> str:
    """Return the text of an error and of its causes."""
    said = str(error).strip()
    found = said if isinstance(error, DeckhandsError) else ": ".join(filter(None, (type(error).__name__, said)))
    return f"{found} (caused by {_cause(error.__cause__)})" if error.__cause__ is not None else found


def _point_of(event: Event) -> HookPoint | None:
    if isinstance(event, AgentFinishAction):
        return HookPoint.BEFORE_FINISH
    return HookPoint.BEFORE_ACTION if isinstance(event, Action) and event.runnable else None


def _about(event: Event, event_id: int) -> dict[str, Any]:
    return {"event": event.export() | {"id": event_id}}


def function_hook(function: HookFunction) -> Callable[[Mapping[str, Any]], Awaitable[str | None]]:
    """Return the `ask` function for a Python function."""
    if inspect.iscoroutinefunction(function):
        return function

    async def ask(told: Mapping[str, Any]) -> str | None:
        answer = await asyncio.to_thread(function, told)
        return await answer if inspect.isawaitable(answer) else answer

    return ask


def _status_name(status: int | None) -> str:
    return f"{status}" if status is None or status >= 0 else f"the signal {signal.Signals(-status).name}"


def command_hook(command: Sequence[str]) -> Callable[[Mapping[str, Any]], Awaitable[str | None]]:
    """Return the `ask` function for a command: JSON as its input; exit code 2 vetoes with its standard error."""

    async def ask(told: Mapping[str, Any]) -> str | None:
        with tempfile.TemporaryFile() as printed:  # processes that the command leaves behind could hold a pipe open
            status, errors = await _ended(command, json.dumps(told).encode(), printed)
            printed.seek(0)
            text = (errors.strip() or printed.read(4 * MAX_REASON_CHARS).strip()).decode(errors="replace")
        if status == VETO_EXIT_CODE:
            return text or f"the hook {command[0]} said no"
        if status != 0:
            raise DeckhandsError(f"it ended with {_status_name(status)}: {text or 'it wrote nothing'}")
        return None

    return ask


async def _ended(command: Sequence[str], told: bytes, printed: IO[bytes]) -> tuple[int | None, bytes]:
    """Run a command to its end and return its status and its standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=printed, stderr=pipe, start_new_session=True
    )
    try:
        _, errors = await process.communicate(told)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its child processes, which nothing else would end
        with contextlib.suppress(TimeoutError):  # a process that has left the group may hold the pipe open
            await asyncio.wait_for(process.wait(), LAST_WORDS_SECONDS)
        raise
    return process.returncode, errors
