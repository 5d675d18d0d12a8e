"""The endpoint for user interfaces: AG-UI 1.0 at `/ag-ui`, one run of an agent a request.

Holds: a thread is a conversation, and a run is named in its log; so a repeated request, to any server, has no second
effect and gets the events of its run: all of them, or those after `Last-Event-ID`. A thread of another tenant appears
not to exist. If the client disconnects, the conversation continues.
Does not: run tools of the frontend, or keep its state; agents have their own tools and state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from typing import Annotated, Any, Self

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from broker.contract import AgentState, Event
from broker.log import LiveText, fold_status
from broker.runtime import EventsLost, UnknownConversation, UsageError
from deckhands.client import Client, Tally, TaskSpec, to_conversation_id
from deckhands.server.conversations import submit_task
from deckhands.server.dependencies import GatewayOf, Reader, Writer, scoped_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.live import ALIVE, SseResponse
from deckhands.server.models import MAX_MODEL
from deckhands.server.problems import Problem
from deckhands.server.protocols.ag_ui_events import (
    Cursor,
    RunEvents,
    edits_of,
    find_last_run,
    find_run,
    interrupt_id,
    mark_run,
)
from deckhands.server.protocols.ag_ui_input import NAME, Resumption, RunRequest
from deckhands.server.streams import EventStream, Item, reserve_stream, with_full_message

routes = APIRouter(tags=["ag-ui"])
REFUSED = "The user has refused this action."
DISMISSED = "The user has dismissed the question."
READ_AT_ONCE = 50
EXAMPLE = 'id: 2.1\ndata: {"type":"RUN_STARTED","threadId":"order-18","runId":"run-1"}\n\n'
ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"example": EXAMPLE}}}}

LastId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=100, description="the id of the last event that the client has"),
]


class InterruptRefused(UsageError):
    """The run does not answer an open interrupt, or answers one that is not open."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


@routes.post("/ag-ui", response_class=Response, responses=ANSWERS, summary="Run an agent (AG-UI)")
async def run(
    gateway: GatewayOf,
    principal: Writer,
    _reader: Reader,
    asked: RunRequest,
    *,
    agent: Annotated[str | None, Query(max_length=100, description="of a new thread")] = None,
    model: Annotated[str | None, Query(max_length=MAX_MODEL, description="of a new thread")] = None,
    last_event_id: LastId = None,
) -> Response:
    """Create or continue the thread, and stream the events of the run until the conversation has settled.

    A request with the `runId` of an earlier run has no effect, and streams that run again.
    """
    cursor = _parse(last_event_id)
    thread = await _Thread.open(gateway, principal, asked.thread_id)
    try:
        if thread.conversation_id is None:
            if asked.resume:
                raise _no_interrupt(asked.resume)
            await thread.create(asked.task(agent, model))
        events = await thread.load()
        start = find_run(events, asked.run_id)
        if start is None:
            await thread.continue_(asked, events)
            events += await thread.load(after=events[-1].id)
            start = find_run(events, asked.run_id)
    except InterruptRefused as error:
        return _refuse(error)
    if start is None:  # the log masks it
        raise UsageError("runId: it contains a secret of the thread.", remedy="Send the run under another name.")
    return await thread.stream(RunEvents(asked.thread_id, asked.run_id, start, cursor), events)


@routes.get("/ag-ui", response_class=Response, responses=ANSWERS, summary="Follow a run (AG-UI)")
async def follow(
    gateway: GatewayOf,
    principal: Reader,
    thread_id: Annotated[str, Query(alias="threadId", pattern=NAME)],
    run_id: Annotated[
        str | None, Query(alias="runId", pattern=NAME, description="the run; by default the last one")
    ] = None,
    last_event_id: LastId = None,
) -> Response:
    """Stream the events of a run, from its start or after `Last-Event-ID`, until the conversation has settled.

    The run starts with all earlier messages of the thread, so a reloaded page shows the whole thread.
    """
    cursor = _parse(last_event_id)
    thread = await _Thread.open(gateway, principal, thread_id)
    if thread.conversation_id is None:
        raise UnknownConversation(thread_id)
    events = await thread.load()
    found = find_last_run(events) if run_id is None else (run_id, find_run(events, run_id))
    if found is None or found[1] is None:
        raise Problem(404, "unknown_run", "The thread has no such run.", remedy="Leave `runId` out for the last one.")
    return await thread.stream(RunEvents(thread_id, found[0], found[1], cursor), events)


class _Thread:
    """A thread of a principal.

    Attributes:
        conversation_id: the conversation that it created, or the one with its name; None if it is new.
    """

    def __init__(self, gateway: Gateway, principal: Principal, thread_id: str) -> None:
        self._gateway, self._principal, self._thread_id = gateway, principal, thread_id
        self._key = scoped_key(principal, f"ag-ui:{thread_id}")
        self.conversation_id: str | None = None

    @classmethod
    async def open(cls, gateway: Gateway, principal: Principal, thread_id: str) -> Self:
        """Return a thread, and reserve a stream for it."""
        reserve_stream(gateway, principal)
        await asyncio.to_thread(import_module, "ag_ui.core")  # takes half a second, once
        thread = cls(gateway, principal, thread_id)
        for each in (thread_id, to_conversation_id(None, thread._key)):
            with contextlib.suppress(UnknownConversation):
                thread.conversation_id = await gateway.require_visible(principal, each)
        return thread

    async def create(self, task: TaskSpec) -> None:
        """Create the conversation of the thread; no effect if another request has created it."""
        self.conversation_id = await submit_task(self._gateway, self._principal, task, self._key, is_watched=True)

    async def load(self, after: int = 0) -> list[Event]:
        """Return the events of the thread, or those after an event, with the agent's messages in full."""
        assert self.conversation_id is not None
        client = self._gateway.follower
        events = await client.events(self.conversation_id, after=after, is_lenient=True)
        return [await with_full_message(client, self.conversation_id, event) for event in events]

    async def continue_(self, asked: RunRequest, events: Sequence[Event]) -> None:
        """Send the run's message, or answer the interrupt of the run before."""
        assert self.conversation_id is not None
        await LiveText(self._gateway.store, self.conversation_id).register_watcher()
        status = fold_status(events)
        if status.state is AgentState.AWAITING_USER_CONFIRMATION and not status.is_unanswered:
            await self._answer(asked, events, status.confirmation_id)
            return
        if asked.resume:
            raise _no_interrupt(asked.resume)
        text, images = asked.message()
        try:
            await self._client("message", asked).send_message(self.conversation_id, text, images=images)
        except UsageError as error:
            raise Problem(409, "conflict", error.message, remedy=error.remedy) from error

    async def _answer(self, asked: RunRequest, events: Sequence[Event], action_id: int | None) -> None:
        assert self.conversation_id is not None
        name = interrupt_id(action_id)
        if not asked.resume:
            raise InterruptRefused("interrupt_open", f"The interrupt {name} is open.", "Answer it in `resume`.")
        if [each.interrupt_id for each in asked.resume] != [name]:
            raise _no_interrupt(asked.resume)
        (answer,) = asked.resume
        payload = _check_payload(answer)
        try:
            if payload.get("approved"):
                action = next(event for event in events if event.id == action_id)
                edited = edits_of(action, payload["editedArgs"]) if payload.get("editedArgs") else {}
                edited |= {"answers": payload["answers"]} if "answers" in payload else {}
                client = self._client("confirm", asked)
                await client.confirm(self.conversation_id, action_id=action_id, edited=edited)
            else:
                why = DISMISSED if answer.status == "cancelled" else payload.get("reason") or REFUSED
                client = self._client("reject", asked)
                await client.reject(self.conversation_id, reason=why, action_id=action_id)
        except UsageError as error:
            raise InterruptRefused("interrupt_refused", error.message, error.remedy) from error

    def _client(self, action: str, asked: RunRequest) -> Client:
        key = scoped_key(self._principal, f"ag-ui:{asked.thread_id}#{asked.run_id}")
        return self._gateway.client_for(self._principal, action, mark_run(asked.run_id), key=key)

    async def stream(self, converted: RunEvents, events: list[Event]) -> Response:
        """Return the stream of a run.

        Raises:
            EventsLost: the log ends before the client's last event.
        """
        assert self.conversation_id is not None
        last = events[-1].id
        if converted.seen_id > last:
            raise EventsLost(self.conversation_id, last, converted.seen_id)
        await LiveText(self._gateway.store, self.conversation_id).register_watcher()
        rest = EventStream(
            self._gateway,
            self._principal,
            self.conversation_id,
            after=last,
            deltas=True,
            until_settled=True,
            is_said_whole=True,
            tally=Tally.of(events),
        )
        headers = {"Location": f"/conversations/{self.conversation_id}"}
        stream = _RunStream(events, rest, converted)
        return SseResponse(self._gateway, stream, headers, head=ALIVE, written=converted.of)


def _check_payload(answer: Resumption) -> dict[str, Any]:
    """Return the payload of an answer, if it matches the interrupt's schema.

    Raises:
        InterruptRefused: the payload does not match.
    """
    if answer.status == "cancelled":
        return {}
    payload = answer.payload
    is_valid = isinstance(payload, dict) and isinstance(payload.get("approved"), bool)
    if is_valid:
        assert isinstance(payload, dict)
        kinds = (("reason", str), ("editedArgs", dict), ("answers", dict))
        is_valid = all(isinstance(payload.get(name, kind()), kind) for name, kind in kinds)
    if not is_valid:
        raise InterruptRefused(
            "invalid_payload",
            "The payload of the answer is not of the interrupt's `responseSchema`.",
            'Send {"approved": true} or {"approved": false}.',
        )
    return dict(payload)


def _no_interrupt(resume: Sequence[Resumption]) -> InterruptRefused:
    names = ", ".join(each.interrupt_id for each in resume)
    return InterruptRefused("unknown_interrupt", f"No such interrupt is open: {names}.", "Follow the thread again.")


def _refuse(error: InterruptRefused) -> Response:
    """Return a stream that only reports why the run was refused, as the protocol requires for interrupts."""
    from ag_ui import core

    event = core.RunErrorEvent(message=f"{error.message} {error.remedy}", code=error.code)
    text = event.model_dump_json(by_alias=True)
    return Response(f"data: {text}\n\n", media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _parse(last_event_id: str | None) -> Cursor | None:
    cursor = Cursor.parse(last_event_id) if last_event_id else None
    if last_event_id and cursor is None:
        raise UsageError("Last-Event-ID: it is not the id of an event.", remedy="Leave it out to read the run again.")
    return cursor


class _RunStream:
    """The items of a run: first the events that were already read, then those of a stream, until the run is closed."""

    def __init__(self, events: Sequence[Event], rest: EventStream, converted: RunEvents) -> None:
        self._events, self._rest, self._converted = deque(events), rest, converted

    async def batches(self) -> AsyncGenerator[list[Item]]:
        """Yield items as they arrive; see `EventStream.batches`."""
        while self._events:
            first = [self._events.popleft() for _ in range(min(READ_AT_ONCE, len(self._events)))]
            yield [Item("event", {}, each.id, event=each) for each in first]
            if self._converted.is_closed:
                return
        async with contextlib.aclosing(self._rest.batches()) as batches:
            async for batch in batches:
                yield batch
                if self._converted.is_closed:
                    return
