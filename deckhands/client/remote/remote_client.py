"""The conversations of a server, with the methods of `Client` that a `Conversation` uses.

Holds: a request takes effect once, even if replies are lost; an interrupted stream is resumed after its last event.
Does not: start a conversation under an id of the caller's choice, because the server chooses it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from broker.contract import DEFAULT_TIMEOUT_SECONDS, AgentSpec, Event, MessagePolicy
from broker.coordination import make_content_name
from broker.log import ConversationProgress, LivePiece, parse_exported_event
from broker.runtime import EventsLost, StoreUnavailable, UnknownConversation, UsageError, draw_jitter, to_millis
from broker.secrets import SecretValue
from deckhands.client.changing import Change
from deckhands.client.errors import NotSettled, NotStopped
from deckhands.client.named_directory import DirectoryNotTaken
from deckhands.client.reading.summary import Summary
from deckhands.client.reasons.link import Why
from deckhands.client.remote.remote_files import LONG_SECONDS, PackedDirectory, RemoteFiles, pack_directory
from deckhands.client.remote.server_calls import PAUSE_SECONDS, ServerCalls, problem_as_error
from deckhands.client.tasks import inputs
from deckhands.client.tasks.spec import TaskSpec
from deckhands.client.tasks.tasks import Image, check_task, to_image_urls
from deckhands.client.trajectories import Trajectory
from deckhands.client.transfers.commands import CommandResult
from deckhands.client.verification import Verification
from deckhands.client.watcher import Until, Watcher, tail_until_settled

LOOKED_UP_AT_ONCE = 100
"""The maximum that a server accepts in one request."""
SHORTEST_PAUSE_SECONDS = 0.5
DEFAULT_REASON = "asked for by a program"
"""The reason in the log if the caller gives none."""


class RemoteClient:
    """The conversations that a key may see.

    Args:
        url: the address of the server.
        api_key: an API key of the server; empty for none.
        directory: returns the directory of this machine for the path of a workspace. If no tool worker accepts the path
            and the directory exists here, a copy of it is sent. None to send nothing.
    """

    def __init__(self, url: str, api_key: str = "", *, directory: Path | None = None) -> None:
        self._directory = directory
        self._calls = ServerCalls(url, api_key)
        # By idempotency key: a retried submission must send the same archive until it is known to have succeeded.
        self._copies: dict[str, PackedDirectory] = {}
        self.watcher = Watcher(_ServerSource(self), None, shortest_pause_seconds=SHORTEST_PAUSE_SECONDS)

    @property
    def files(self) -> RemoteFiles:
        """The files of the conversations' workspaces."""
        return RemoteFiles(self._calls)

    async def aclose(self) -> None:
        """Close the connections; pending waits raise StoreUnavailable."""
        await self.watcher.aclose()
        await self._calls.aclose()

    async def exists(self, conversation_id: str) -> bool:
        """Return whether there is a conversation that the key may see."""
        try:
            await self._calls.ask("GET", f"/conversations/{conversation_id}")
        except UnknownConversation:
            return False
        return True

    async def submit(
        self,
        task: TaskSpec,
        *,
        upload: bytes | None = None,
        conversation_id: str | None = None,  # noqa: ARG002  (the server chooses it)
        idempotency_key: str,
    ) -> str:
        """Start a conversation and return its id; see `Client.submit`."""
        body = task.model_dump(mode="json", exclude_none=True, exclude={"model", "output", "idempotency_key"})
        body["agent"] = task.agent_spec().model_dump(mode="json", exclude_none=True)
        copy = self._copies.get(idempotency_key)
        if copy is None:
            try:
                return await self._begin(body, upload, idempotency_key)
            except UsageError as error:
                if error.code == DirectoryNotTaken.code and self._directory is not None:
                    copy = await asyncio.to_thread(pack_directory, self._directory)
                if copy is None:
                    raise
            self._copies[idempotency_key] = copy
        sent = task.workspace_spec().model_copy(update={"path": None, "source": copy.source})
        body["workspace"] = sent.model_dump(mode="json", exclude_none=True)
        try:
            begun = await self._begin(body, copy.content, idempotency_key)
        except UsageError:  # nothing was created; the files may change before the next attempt
            self._copies.pop(idempotency_key, None)
            raise
        self._copies.pop(idempotency_key, None)
        return begun

    async def _begin(self, body: Mapping[str, Any], upload: bytes | None, key: str) -> str:
        if upload is not None:
            path = f"/uploads/{make_content_name(upload)}"
            await self._calls.ask("PUT", path, content=upload, key=key, read_seconds=LONG_SECONDS)
        answer = await self._calls.ask("POST", "/conversations", body=body, key=key)
        return str(answer.json()["conversation_id"])

    async def send_message(
        self,
        conversation_id: str,
        text: str,
        *,
        images: Sequence[Image] = (),
        model: str | None = None,
        double_texting: MessagePolicy | None = None,
    ) -> None:
        """Send a message to the agent; see `Client.send_message`."""
        check_task(inputs.check_text(text, "text"), name="message")
        urls = await asyncio.to_thread(to_image_urls, images)
        body = {"content": text, "images": list(urls or ()), "model": model, "double_texting": double_texting}
        await self._post(conversation_id, "messages", body)

    async def events(self, conversation_id: str, *, after: int = 0, is_whole: bool = False) -> list[Event]:
        """Return the events above `after`, in order; see `Client.events`."""
        found: list[Event] = []
        place: int | None = after
        while place is not None:
            query = {"after": place, "limit": 500, "whole": is_whole}
            page = (await self._calls.ask("GET", f"/conversations/{conversation_id}/events", query=query)).json()
            found += [parse_exported_event(event) for event in page["events"]]
            place = page["next_after"]
        return found

    async def tail(
        self, conversation_id: str, *, after: int = 0, is_whole: bool = False, is_endless: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Yield the events above `after`, then each new one; see `Client.tail`."""
        if not is_endless:
            known = [event for event in await self.events(conversation_id) if event.id <= after] if after else []
            tail = self.tail(conversation_id, after=after, is_whole=is_whole, is_endless=True)
            ending = tail_until_settled(self, conversation_id, tail, known=known, after=after)
            async with contextlib.aclosing(ending) as events:
                async for event in events:
                    yield event
            return
        path, seen = f"/conversations/{conversation_id}/stream", after
        while True:
            messages = self._calls.stream(path, {"after": seen, "whole": is_whole})
            try:
                async with contextlib.aclosing(messages):
                    async for kind, content in messages:
                        if kind == "event":
                            yield parse_exported_event(content)
                            seen = int(content["id"])
                        elif kind == "end":
                            return
                        elif kind == "problem" and not content["retryable"]:
                            raise problem_as_error(content, conversation_id)
            except EventsLost:
                raise EventsLost(conversation_id, await self.last_id(conversation_id), seen) from None
            except StoreUnavailable:
                pass  # a conversation outlives every server
            await asyncio.sleep(PAUSE_SECONDS * draw_jitter())

    async def pieces(self, conversation_id: str) -> AsyncGenerator[LivePiece]:
        """Yield the pieces of replies while they are written; some may be missing.

        Raises:
            ServerUnavailable: the connection to the server was lost.
        """
        query = {"after": await self.last_id(conversation_id), "deltas": True}
        messages = self._calls.stream(f"/conversations/{conversation_id}/stream", query)
        async with contextlib.aclosing(messages):
            async for kind, content in messages:
                if kind == "delta":
                    yield LivePiece(content["call"], content["kind"], content["text"], content.get("at"))

    async def announce(self, conversation_id: str) -> None:
        """Do nothing: a stream with pieces registers its reader itself."""

    async def summary(self, conversation_id: str) -> Summary:
        """Return the summary of a conversation; see `Client.summary`."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}")
        return Summary.from_json(answer.json()["summary"])

    async def why(self, conversation_id: str) -> Why:
        """Return the reasons for a conversation's state; see `Client.why`."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/why")
        return Why.from_json(answer.json())

    async def trajectory(self, conversation_id: str) -> Trajectory:
        """Return the exact tokens of a rollout; see `Client.trajectory`."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/trajectory")
        return Trajectory.from_json(answer.json())

    async def verify(self, conversation_id: str) -> Verification:
        """Check the log of a conversation; see `Client.verify`."""
        answer = await self._calls.ask("GET", f"/conversations/{conversation_id}/verification")
        return Verification.from_json(answer.json())

    async def last_id(self, conversation_id: str) -> int:
        """Return the id of its last event."""
        (progress,) = await self.progress([conversation_id])
        return (await self.summary(conversation_id)).last_event_id if progress is None else progress.last_id

    async def progress(self, conversation_ids: Sequence[str]) -> list[ConversationProgress | None]:
        """Return the progress of conversations; None for those that are not in the server's store."""
        found: dict[str, ConversationProgress] = {}
        for at in range(0, len(conversation_ids), LOOKED_UP_AT_ONCE):
            query = {"id": list(conversation_ids[at : at + LOOKED_UP_AT_ONCE])}
            page = (await self._calls.ask("GET", "/conversations", query=query)).json()
            found |= {row["conversation_id"]: _progress(row) for row in page["conversations"]}
        return [found.get(conversation_id) for conversation_id in conversation_ids]

    async def wait_until_settled(self, conversation_id: str, *, timeout_seconds: float | None = None) -> Summary:
        """See `Client.wait_until_settled`."""
        return (await self.watcher.wait(conversation_id, timeout_seconds=timeout_seconds)).summary

    async def pause(self, conversation_id: str) -> None:
        """See `Client.pause`."""
        await self._post(conversation_id, "pause", {"reason": DEFAULT_REASON})

    async def resume(self, conversation_id: str, *, model: str | None = None) -> None:
        """See `Client.resume`."""
        await self._post(conversation_id, "resume", {"reason": DEFAULT_REASON, "model": model})

    async def interrupt(self, conversation_id: str) -> None:
        """See `Client.interrupt`."""
        await self._post(conversation_id, "interrupt", {"reason": DEFAULT_REASON})

    async def confirm(
        self, conversation_id: str, *, action_id: int | None = None, edited: Mapping[str, Any] | None = None
    ) -> None:
        """See `Client.confirm`."""
        await self._post(conversation_id, "confirm", {"action_id": action_id, "edited": dict(edited or {})})

    async def reject(self, conversation_id: str, *, reason: str = "", action_id: int | None = None) -> None:
        """See `Client.reject`."""
        await self._post(conversation_id, "reject", {"action_id": action_id, "reason": reason})

    async def cancel(self, conversation_id: str, *, wait_seconds: float | None = None) -> Summary:
        """See `Client.cancel`."""
        await self._post(conversation_id, "cancel", {"reason": DEFAULT_REASON})
        if wait_seconds is None:
            return await self.summary(conversation_id)
        try:
            end = await self.watcher.wait(conversation_id, until=Until.OVER, timeout_seconds=wait_seconds)
        except NotSettled as error:
            raise NotStopped(conversation_id, wait_seconds) from error
        return end.summary

    async def close(self, conversation_id: str) -> None:
        """See `Client.close`."""
        await self._post(conversation_id, "close", {"reason": DEFAULT_REASON})

    async def execute(
        self,
        conversation_id: str,
        command: str,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        by: str = "",
        reason: str = "",
    ) -> CommandResult:
        """See `Client.execute`; the author in the log is the key, and `by` is put into the reason."""
        if not isinstance(command, str) or not command.strip() or "\0" in command:
            raise UsageError("The command is empty, or has a NUL character.", remedy="Pass a command for bash.")
        body = {"command": command, "timeout_seconds": timeout_seconds, "reason": _add_author(by, reason)}
        answer = await self._calls.ask(
            "POST", f"/conversations/{conversation_id}/execute", body=body, read_seconds=timeout_seconds + 90
        )
        done = answer.json()
        return CommandResult(done["event_id"], done["output"], done["exit_code"])

    async def change(self, conversation_id: str, change: Change, *, model: str | None = None) -> None:
        """See `Client.change`; the author in the log is the key, and `by` is put into the reason."""
        agent, policy = change.agent, change.confirmation
        body = {
            "agent": agent.model_dump(mode="json", exclude_none=True) if isinstance(agent, AgentSpec) else agent,
            "model": model,
            "confirmation": None if policy is None else policy.model_dump(mode="json", exclude_none=True),
            "analyzer": change.analyzer,
            "limits": None if change.limits is None else change.limits.model_dump(mode="json"),
            "tools": list(change.tools),
            "labels": None if change.labels is None else dict(change.labels),
            "reason": _add_author(change.by, change.reason) or DEFAULT_REASON,
        }
        await self._calls.ask("PATCH", f"/conversations/{conversation_id}", body=body)

    async def fork(
        self, conversation_id: str, *, at: int | None = None, model: str | None = None, title: str = ""
    ) -> str:
        """See `Client.fork`."""
        answer = await self._post(conversation_id, "fork", {"at": at, "model": model, "title": title})
        return str(answer["conversation_id"])

    async def set_secrets(self, conversation_id: str, secrets: Mapping[str, SecretValue]) -> None:
        """Add secrets, or replace those with the same names."""
        if secrets:
            written = {name: value if isinstance(value, str) else value.model_dump() for name, value in secrets.items()}
            await self._calls.ask("PUT", f"/conversations/{conversation_id}/secrets", body={"secrets": written})

    async def _post(self, conversation_id: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._calls.ask("POST", f"/conversations/{conversation_id}/{verb}", body=body)
        found: dict[str, Any] = answer.json()
        return found


@dataclass(frozen=True, slots=True)
class _ServerSource:
    """The conversations of a server, as a source for its watcher."""

    client: RemoteClient

    async def progress(self, conversation_ids: Sequence[str]) -> Sequence[ConversationProgress | None]:
        return await self.client.progress(conversation_ids)

    async def read(self, conversation_id: str) -> Sequence[Event]:
        return await self.client.events(conversation_id, is_whole=True)


def _progress(row: Mapping[str, Any]) -> ConversationProgress:
    numbers = row["numbers"]
    return ConversationProgress(
        last_id=row["version"],
        state=row["state"],
        wait_reason=row["wait_reason"],
        iterations=int(numbers.get("iterations", 0)),
        cost_usd=float(numbers.get("cost_usd", 0)),
        tokens=int(numbers.get("prompt_tokens", 0)) + int(numbers.get("completion_tokens", 0)),
        created_ms=to_millis(datetime.fromisoformat(row["created"])),
        updated_ms=to_millis(datetime.fromisoformat(row["updated"])),
    )


def _add_author(by: str, reason: str) -> str:
    return ": ".join(part for part in (inputs.check_text(by, "by"), inputs.check_text(reason, "reason")) if part)
