"""Commands that a user runs in a workspace beside the agent.

Holds: a command is in the log before it runs, and runs once, even after crashes; its output is masked and shortened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_COMMAND_CHARS,
    MAX_TIMEOUT_SECONDS,
    CommandExecutedObservation,
    ConversationCreated,
    Event,
    ExecuteCommandAction,
    WorkspaceOpenedObservation,
    decode_any,
)
from broker.coordination import NoWorkspace
from broker.log import Closed, EventLog, find_latest_event, tail_recording_gaps
from broker.runtime import DeckhandsError, UsageError

START_LIMIT_SECONDS = 60.0
"""How long a tool worker may take to start."""


class CommandFailed(DeckhandsError):
    """A user's command could not be run, or no worker has answered; the text has the reason."""

    code = "command_failed"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        event_id: the id of the command in the log.
        output: both streams together; the middle of a long output is left out.
        exit_code: -1 if it was killed, because it took too long or was stopped.
    """

    event_id: int
    output: str
    exit_code: int


async def execute(
    log: EventLog,
    conversation_id: str,
    command: str,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    by: str | None = None,
    reason: str | None = None,
    first: Sequence[Event] = (),
    key: str | None = None,
) -> CommandResult:
    """Run a command in a conversation's workspace, in a separate shell, and return its result.

    Idempotent under the same `key`: a repeated call waits for the same command.

    Args:
        log: the log that masks secrets.
        first: events to append before the command.

    Raises:
        UsageError: the command is invalid, or the conversation is unknown, closed or has no workspace yet.
        CommandFailed: the command could not be run, or no tool worker has answered.
    """
    action = ExecuteCommandAction(command=command, timeout=timeout_seconds, by=by, reason=reason)
    event_id = await start(log, conversation_id, action, first=first, key=key)
    try:
        async with asyncio.timeout(timeout_seconds + START_LIMIT_SECONDS):
            answer = await _answer(log, conversation_id, event_id)
    except TimeoutError as error:
        raise CommandFailed(
            f"No tool worker has answered the command, which is event {event_id} of {conversation_id}.",
            remedy="It runs when one takes it up. Start a tool worker on the node that has the workspace.",
        ) from error
    if answer.error_id:
        raise CommandFailed(answer.content)
    return CommandResult(event_id, answer.content, answer.exit_code)


async def start(
    log: EventLog,
    conversation_id: str,
    action: ExecuteCommandAction,
    *,
    first: Sequence[Event] = (),
    key: str | None = None,
    may_open: bool = False,
) -> int:
    """Start a command, and return its event id; the result is the observation of that event.

    Args:
        first: events to append before the command.
        may_open: the command opens the workspace if it is not open yet.

    Raises:
        UsageError: the command is invalid, or the conversation is unknown, closed or has no workspace yet.
    """
    _check(action.command, action.timeout)
    if not may_open:
        await _require_workspace(log, conversation_id)
    outcome = await log.append(conversation_id, [*first, action], key=key, quiet=True, dispatch=[len(first)])
    if isinstance(outcome, Closed):
        raise UsageError(f"The conversation {conversation_id} is closed.", remedy="Its workspace has ended.")
    return outcome.last_id


async def _answer(log: EventLog, conversation_id: str, event_id: int) -> CommandExecutedObservation:
    async with contextlib.aclosing(
        tail_recording_gaps(log, conversation_id, after=event_id, decode=decode_any)
    ) as events:
        async for event in events:
            if event.cause == event_id and isinstance(event, CommandExecutedObservation):
                return event
            if event.cause == event_id:  # from a tool worker of an older version
                raise CommandFailed(getattr(event, "content", "") or "The tool worker cannot run users' commands.")
    raise AssertionError("it follows for ever")


def _check(command: str, timeout_seconds: float) -> None:
    if not isinstance(command, str) or not command.strip() or "\0" in command:
        raise UsageError("The command is empty, or has a NUL character.", remedy="Pass a command for bash.")
    if len(command) > MAX_COMMAND_CHARS:
        raise UsageError(
            f"The command has {len(command):,} characters; the limit is {MAX_COMMAND_CHARS:,}.",
            remedy="Upload a script, and run that.",
        )
    if not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(
            f"The timeout is {timeout_seconds:g} seconds.", remedy=f"Pass up to {MAX_TIMEOUT_SECONDS:g} seconds."
        )


async def _require_workspace(log: EventLog, conversation_id: str) -> None:
    """Refuse a conversation without a workspace, because a command would create an empty one.

    Raises:
        NoWorkspace: the conversation has no workspace.
    """
    store, meta = log.store, (await log.store.locate(conversation_id)).meta
    await log.load_last_id(conversation_id)
    has_node = await store.call("HGET", meta, "node") is not None
    (created,) = await log.read(conversation_id, until=1)
    if has_node and isinstance(created, ConversationCreated) and created.workspace.source is not None:
        has_node = await find_latest_event(store, conversation_id, WorkspaceOpenedObservation) is not None
    if not has_node:
        raise NoWorkspace(conversation_id)
