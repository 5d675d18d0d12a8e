"""Follow a conversation until it settles, and let the user answer its questions.

Holds: if the store acknowledged an answer but lost it before the next event, the question is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from broker.contract import (
    AgentState,
    ChangeAgentStateAction,
    ConfirmationStatus,
    Event,
    ModelReply,
    RiskyAction,
    asks_for_server,
)
from broker.runtime import EventsLost
from deckhands.client.client import Client
from deckhands.client.reading.summary import Tally
from deckhands.client.watcher import has_ended

ANSWER_SECONDS = 1.0
"""How often to check that the log still has an answer that nothing has followed yet."""

OnEvent = Callable[[Event], None]
Ask = Callable[[RiskyAction], Awaitable[bool | Mapping[str, Any]]]
"""Returns whether an action may run; for a question of an MCP server, also the person's answers."""


async def follow(
    client: Client,
    conversation_id: str,
    tally: Tally,
    on_event: OnEvent,
    *,
    ask: Ask | None,
    show_rest: Callable[[], Awaitable[None]],
    reply: str | None = None,
) -> None:
    """Pass on the events of a conversation until it settles.

    Args:
        tally: collects the events.
        ask: see `Ask`. None: no user is present, and a question ends the following.
        show_rest: called before each reply is passed on.
        reply: returns a message for an agent that waits for one; None: its question ends the following.
    """
    following = _RunFollower(client, conversation_id, tally, on_event, ask=ask, show_rest=show_rest, reply=reply)
    after = 0
    while True:
        try:
            tail = client.tail(conversation_id, after=after, is_whole=True, is_endless=True)
            async with contextlib.aclosing(tail) as events:
                await following.until_settled(_EventReader(events))
                return
        except EventsLost as lost:
            after = following.without_answer(lost)


class _RunFollower:
    """The state of following a conversation; takes the arguments of `follow`."""

    def __init__(
        self,
        client: Client,
        conversation_id: str,
        tally: Tally,
        on_event: OnEvent,
        *,
        ask: Ask | None,
        show_rest: Callable[[], Awaitable[None]],
        reply: str | None,
    ) -> None:
        self._reply = reply
        self._client = client
        self._conversation_id = conversation_id
        self._tally = tally
        self._on_event = on_event
        self._ask = ask
        self._show_rest = show_rest
        self._waiting: dict[int, RiskyAction] = {}
        self._answered_at: int | None = None
        """The last event before an answer that nothing has followed yet."""
        self._answer: Event | None = None
        """That answer, once it was read: it counts when something has followed it."""

    async def until_settled(self, coming: _EventReader) -> None:
        """Pass on new events until the conversation settles, and answer its questions."""
        while True:
            try:
                event = await coming.next(ANSWER_SECONDS if self._answered_at is not None else None)
            except StopAsyncIteration:  # it is archived
                return
            if self._answered_at is not None and isinstance(event, ChangeAgentStateAction):
                self._answer = event
                continue
            if event is not None:
                for found in (self._answer, event) if self._answer is not None else (event,):
                    await self._pass_on(found)
                self._answer = self._answered_at = None
            tally = self._tally
            if not await has_ended(self._client, self._conversation_id, tally):
                continue
            self._answer = None  # the log has lost the answer, if there was one
            asked = self._waiting.get(tally.status.confirmation_id or 0)
            if self._reply is not None and tally.status.state is AgentState.AWAITING_USER_INPUT:
                await self._client.send_message(self._conversation_id, self._reply)
                self._answered_at = tally.last_event_id
                continue
            if self._ask is None or asked is None:
                return
            said = await self._ask(asked)
            is_answered = isinstance(said, Mapping)
            if is_answered or (said and not asks_for_server(asked)):
                edited = {"answers": said} if is_answered else {}
                await self._client.confirm(self._conversation_id, action_id=asked.id, edited=edited)
            else:
                await self._client.reject(self._conversation_id, action_id=asked.id)
            self._answered_at = tally.last_event_id

    def without_answer(self, lost: EventsLost) -> int:
        """Forget an answer that the log has lost, and return the event after which to continue following.

        Raises:
            EventsLost: more than the answer is gone.
        """
        if self._answered_at is None or lost.last_id < self._answered_at:
            raise lost
        self._answer = None
        return self._answered_at

    async def _pass_on(self, event: Event) -> None:
        if isinstance(event, ModelReply):  # all pieces come before the events that follow from them
            await self._show_rest()
        self._on_event(event)
        self._tally.add(event)
        if isinstance(event, RiskyAction) and event.confirmation_state is ConfirmationStatus.AWAITING_CONFIRMATION:
            self._waiting[event.id] = event


class _EventReader:
    """The events of a log as they arrive; waiting for the next one can be stopped and resumed."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._next: asyncio.Future[Event] | None = None

    async def next(self, limit_seconds: float | None) -> Event | None:
        """Return the next event; None if none arrived within the limit."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
        try:
            done, _ = await asyncio.wait((self._next,), timeout=limit_seconds)
        except asyncio.CancelledError:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)  # a running generator cannot be closed
            raise
        if not done:
            return None
        found, self._next = self._next, None
        return found.result()
