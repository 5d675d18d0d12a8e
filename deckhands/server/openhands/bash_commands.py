"""Commands of OpenHands' clients: started, found in the log, and stopped.

The id of a command or of its output contains the number of its event in the log, so that any server finds it at once.

Holds: a command is in the log before it runs, and runs once. An id of another workspace is unknown.
Differs: both streams are returned together in `stdout`, once the command has ended; the middle of a long output is left
out.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import sha256
from typing import Any
from uuid import UUID

from broker.contract import CommandExecutedObservation, Event, ExecuteCommandAction, decode_any
from broker.runtime import new_conversation_id
from deckhands.client import Client
from deckhands.server.openhands.caller_workspaces import CallerWorkspace
from deckhands.server.problems import Problem

Fields = dict[str, Any]

PAGE = 500
NOTE = "/tmp/.deckhands-"  # noqa: S108  (the sandbox's own, in the sandbox)
NOTE_SECONDS = 10
"""How long a stop waits until the command has started."""
STOP_ATTEMPTS = 3
_MASK = (1 << 48) - 1


def wrap(command: str, place: str) -> str:
    """Wrap a command so that it runs in a directory of the workspace and records its process, to be stoppable."""
    script = f"echo $$ >{NOTE}{new_conversation_id()}\n{command}"
    quoted = shlex.quote(place)
    return f"mkdir -p -- {quoted} && cd -- {quoted} && bash -c {shlex.quote(script)}"


def unwrap(wrapped: str) -> tuple[str, str, str] | None:
    """Return the original of a wrapped command, its directory, and the file with its process; None if not wrapped."""
    try:
        match shlex.split(wrapped):
            case ["mkdir", "-p", "--", place, "&&", "cd", "--", _, "&&", "bash", "-c", script]:
                first, _, command = script.partition("\n")
                note = first.removeprefix("echo $$ >")
                return (command, place, note) if note.startswith(NOTE) and note[len(NOTE) :].isalnum() else None
    except ValueError:
        pass
    return None


def to_bash_id(conversation_id: str, event_id: int) -> UUID:
    """Return the id of an event of a workspace's log."""
    high = int.from_bytes(sha256(conversation_id.encode()).digest()[:8], "big")
    high = high & ~(0xF << 12) | 0x8 << 12  # a UUID of version 8
    return UUID(int=high << 64 | 0b10 << 62 | event_id & _MASK)


def find_bash_event(workspaces: Sequence[CallerWorkspace], name: UUID) -> tuple[CallerWorkspace, int]:
    """Return the workspace of an id, and the number of its event.

    Raises:
        Problem: the id belongs to none of the workspaces.
    """
    event_id = name.int & _MASK
    for workspace in workspaces:
        if event_id and to_bash_id(workspace.conversation_id, event_id) == name:
            return workspace, event_id
    raise Problem(404, "unknown_command", "There is no such command in the workspace.")


def to_bash_event(conversation_id: str, event: Event) -> Fields | None:
    """Convert an event of the log to an event of OpenHands; None if it does not belong to a command."""
    head: Fields = {
        "id": str(to_bash_id(conversation_id, event.id)),
        "timestamp": event.timestamp.isoformat() if event.timestamp is not None else None,
    }
    if isinstance(event, ExecuteCommandAction):
        command, place, _ = unwrap(event.command) or (event.command, None, "")
        return {"kind": "BashCommand", **head, "command": command, "cwd": place, "timeout": int(event.timeout)}
    if isinstance(event, CommandExecutedObservation) and event.cause is not None:
        has_run = not event.error_id
        return {
            "kind": "BashOutput",
            **head,
            "command_id": str(to_bash_id(conversation_id, event.cause)),
            "order": 0,
            "exit_code": event.exit_code if has_run else -1,
            "stdout": event.content if has_run else None,
            "stderr": None if has_run else event.content,
        }
    return None


async def load_bash_events(client: Client, conversation_id: str, after: int = 0) -> AsyncIterator[tuple[Event, Fields]]:
    """Yield the events of commands in a log, in order, each with its original event."""
    while True:
        events = await client.log.read(conversation_id, after=after, until=after + PAGE, decode=decode_any)
        for event in events:
            fields = to_bash_event(conversation_id, event)
            if fields is not None:
                yield event, fields
        if len(events) < PAGE:
            return
        after = events[-1].id


async def find_output(client: Client, conversation_id: str, command_id: int) -> Fields | None:
    """Return the output of a command; None while it runs."""
    async for event, fields in load_bash_events(client, conversation_id, command_id):
        if event.cause == command_id:
            return fields
    return None


async def stop(client: Client, by: str, workspace: CallerWorkspace, event_id: int) -> None:
    """Stop a command and the programs that it has started. No effect if it has ended.

    Raises:
        Problem: there is no such command.
    """
    events = await client.log.read(workspace.conversation_id, after=event_id - 1, until=event_id, decode=decode_any)
    whole = await client.log.blobs.restore_event(workspace.conversation_id, events[0]) if events else None
    wrapped = unwrap(getattr(whole, "command", ""))
    if wrapped is None:
        raise Problem(404, "unknown_command", "There is no such command in the workspace.")
    for _ in range(STOP_ATTEMPTS):
        if await find_output(client, workspace.conversation_id, event_id) is not None:
            return
        command = make_stop_command(wrapped[2])
        done = await client.execute(workspace.conversation_id, command, timeout_seconds=NOTE_SECONDS + 30.0, by=by)
        if done.exit_code == 0:
            return
    raise Problem(409, "not_started", "The command has not started yet.", remedy="Stop it again in a moment.")


def make_stop_command(note: str) -> str:
    """Return a command that waits for the file with a process id, and ends that process; it fails without the file."""
    waiting = f"n=0; until [ -s {note} ]; do [ $((n += 1)) -gt {NOTE_SECONDS * 10} ] && exit 1; sleep 0.1; done"
    return f"{waiting}; p=$(cat {note}); {{ kill -KILL -- -$p || kill -KILL $p; }} 2>/dev/null; :"


def match_kind(fields: Mapping[str, Any], kind: str | None) -> bool:
    """Return whether an event has a kind; None matches any kind."""
    return kind is None or fields["kind"] == kind
