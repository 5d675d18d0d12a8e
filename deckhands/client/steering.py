"""Control of conversations in progress: pause, resume, confirm, reject, change and cancel.

Holds: every request is an event of the log; the owner of the conversation carries it out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from broker.contract import (
    TERMINAL_STATES,
    AgentSpec,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    CondensationRequestAction,
    Event,
    EventSource,
    LoopRecoveryAction,
    ModelSwitched,
    OperatorActed,
    find_model_names,
)
from broker.log import STARTS_WORK, Closed, Condition, Conversations, EventLog, find_latest_event, make_changed_fields
from broker.runtime import UnknownConversation, UsageError
from broker.store import Store
from deckhands.client.changing import Change, check_note
from deckhands.client.conversation_secrets import open_secrets
from deckhands.client.errors import IsArchived, NotSettled, NotStopped
from deckhands.client.known_agents import RecentOffers, require_models
from deckhands.client.reader import Reader
from deckhands.client.reading.summary import Summary, render_state
from deckhands.client.starting import OFFERS_LIMIT_SECONDS
from deckhands.client.tasks import inputs
from deckhands.client.watcher import Until


class Steering(Reader):
    """Control requests to the conversations of a store."""

    def __init__(self, store: Store, archive: str = "") -> None:
        super().__init__(store, archive)
        self.secrets = open_secrets(store)
        self._masked = EventLog(store, self.secrets)
        self._recent_offers = RecentOffers(store)
        self._act: OperatorActed | None = None
        self._act_key: str | None = None

    def as_operator(self, act: OperatorActed, *, key: str | None = None) -> Self:
        """Return a copy of the client whose next call records in the log the acting user and the reason.

        Args:
            act: the record, put before the events that the call appends.
            key: the idempotency key of the call, for calls without one of their own.
        """
        other = copy.copy(self)
        other.watcher = self.watcher  # one, which `aclose` ends
        other._act, other._act_key = act, key  # noqa: SLF001  (its own)
        return other

    async def pause(self, conversation_id: str) -> None:
        """Request a pause: running work is finished, and no new step starts.

        Raises:
            UsageError: the conversation is unknown, closed or over.
        """
        await self._require_open(conversation_id, "paused")
        await self._ask_for(conversation_id, AgentState.PAUSED)

    async def interrupt(self, conversation_id: str) -> None:
        """Stop the current step, and pause: a running command is killed, a pending model reply is dropped.

        Raises:
            UsageError: the conversation is unknown, closed or over.
        """
        await self._require_open(conversation_id, "interrupted")
        request = ChangeAgentStateAction(agent_state=AgentState.PAUSED, is_interrupt=True, source=EventSource.USER)
        await self._append(conversation_id, [request], None)

    async def resume(self, conversation_id: str, *, model: str | None = None) -> None:
        """Continue a paused, stopped or failed conversation, with another `model` if one is named.

        Raises:
            UsageError: the conversation is unknown or closed.
        """
        await self._require_model(conversation_id, model)
        await self._ask_for(conversation_id, AgentState.RUNNING, *to_model_switch(model))

    async def recover(self, conversation_id: str, *, option: int, model: str | None = None) -> None:
        """Take an agent out of its loop. Options: 1 restart before the loop and wait, 2 restart and continue, 3 stop.

        Args:
            model: see `send_message`.

        Raises:
            UsageError: the agent is not in a loop, or there is no such option.
        """
        await self._require_model(conversation_id, model)
        choice = LoopRecoveryAction(option=inputs.to_recovery_option(option), source=EventSource.USER)
        if not (await self._tally(conversation_id)).status.is_in_loop:
            what = f"The agent of the conversation {conversation_id} is not in a loop."
            raise UsageError(what, remedy="Send it a message to continue it.")
        await self._append(conversation_id, [*to_model_switch(model), choice], None)

    async def condense(self, conversation_id: str) -> None:
        """Request that the agent's condenser shortens the history before the next step.

        Raises:
            UsageError: the conversation is unknown or closed.
        """
        await self._append(conversation_id, [CondensationRequestAction(source=EventSource.USER)], None)

    async def confirm(
        self, conversation_id: str, *, action_id: int | None = None, edited: Mapping[str, Any] | None = None
    ) -> None:
        """Run the action that awaits confirmation.

        Args:
            action_id: the action that was shown to the user; None for the pending one.
            edited: new values for fields of the action, such as `command`.

        Raises:
            UsageError: no action is pending, or another one is.
        """
        await self._answer(conversation_id, AgentState.USER_CONFIRMED, action_id, edited)

    async def reject(self, conversation_id: str, *, reason: str = "", action_id: int | None = None) -> None:
        """Refuse the action that awaits confirmation. Raises the errors of `confirm`.

        Args:
            reason: a reason for the agent, which reads it and continues. Without one it waits for a message.
        """
        await self._answer(conversation_id, AgentState.USER_REJECTED, action_id, None, check_note(reason, "reason"))

    async def change(
        self,
        conversation_id: str,
        change: Change,
        *,
        model: str | None = None,
        seen_id: int | None = None,
        idempotency_key: str | None = None,
    ) -> None:
        """Change properties of a conversation from its next step on. Secrets are masked in the reason.

        Args:
            model: the profile or model to continue with.
            seen_id: the last event that the caller has seen, such as `last_event_id` of a summary; None to change it in
                any case.

        Raises:
            ConversationMoved: the log has events after `seen_id`; nothing was changed.
            UsageError: the conversation is unknown or closed, or see `Change.event`.
        """
        agents = (change.agent,) if isinstance(change.agent, AgentSpec) else ()
        await self._require_model(conversation_id, model, *agents)
        switch = to_model_switch(model, by=change.by, reason=change.reason)
        events: list[Event] = [*switch]
        fields: list[tuple[str, str]] = []
        if change.has_parts or not switch:
            changed = await change.event(self.store, offers_limit_seconds=OFFERS_LIMIT_SECONDS)
            events.append(changed)
            fields = make_changed_fields(changed)
        await self._append(
            conversation_id, events, idempotency_key, log=self._masked, seen_id=seen_id, fields=dict(fields)
        )

    async def cancel(self, conversation_id: str, *, wait_seconds: float | None = None) -> Summary:
        """Stop a conversation and everything that runs in it. No effect if it is over. Idempotent.

        Args:
            wait_seconds: how long to wait until the agent has stopped; None not to wait.

        Returns:
            The summary at the end of the wait.

        Raises:
            NotStopped: it has not stopped after `wait_seconds`; the request stays in the log.
        """
        tally = await self._tally(conversation_id)
        if tally.status.is_terminal:
            return tally.summary()
        await self._ask_for(conversation_id, AgentState.STOPPED)
        if wait_seconds is None:
            return await self.summary(conversation_id)
        try:
            end = await self.watcher.wait(conversation_id, until=Until.OVER, timeout_seconds=wait_seconds)
        except NotSettled as error:
            raise NotStopped(conversation_id, wait_seconds) from error
        return end.summary

    async def _require_model(self, conversation_id: str, model: str | None, *agents: AgentSpec) -> None:
        """Refuse to continue a conversation with a model that is not offered to it.

        Raises:
            ModelNotOffered: the model, or one that an agent names, is not offered; the text lists the offered models.
        """
        names = [*filter(None, [model]), *find_model_names(agents)]
        if names:
            with contextlib.suppress(UnknownConversation):  # reported by the append
                row = await self.row(conversation_id)
                await require_models(self.store, names, row.tenant)

    async def _require_open(self, conversation_id: str, what: str) -> None:
        """Refuse a conversation that is over.

        Raises:
            UsageError: the conversation is over.
        """
        if (state := await self.find_end_state(conversation_id)) is not None:
            raise UsageError(
                f"The conversation {conversation_id} {render_state(state)}; it cannot be {what}.",
                remedy="Send it a message to continue it.",
            )

    async def find_end_state(self, conversation_id: str) -> AgentState | None:
        """Return the state in which a conversation is over; None if it is not over.

        Reads the log only if the index has such a state.
        """
        if (await self.row(conversation_id)).state not in TERMINAL_STATES:
            return None
        status = (await self._tally(conversation_id)).status
        return status.state if status.is_terminal else None

    async def _answer(
        self,
        conversation_id: str,
        answer: AgentState,
        action_id: int | None,
        edited: Mapping[str, Any] | None,
        reason: str | None = None,
    ) -> None:
        request = await build_answer(self.store, conversation_id, answer, action_id, edited or {})
        request = request.model_copy(update={"reason": reason})
        is_written = bool(edited or reason)
        await self._append(conversation_id, [request], None, log=self._masked if is_written else self.log)

    async def _ask_for(self, conversation_id: str, state: AgentState, *first: Event) -> None:
        request = ChangeAgentStateAction(agent_state=state, source=EventSource.USER)
        condition: Condition = STARTS_WORK if state is AgentState.RUNNING else ""
        await self._append(conversation_id, [*first, request], None, condition=condition)

    async def _append(
        self,
        conversation_id: str,
        events: Sequence[Event],
        key: str | None,
        *,
        log: EventLog | None = None,
        condition: Condition = "",
        seen_id: int | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """Append events; pass the `log` that masks secrets for text that a user wrote."""
        if self._act is not None:
            events, key = [self._act, *events], key or self._act_key
            log = self._masked if self._act.reason else log
        try:
            await append_as_producer(
                log or self.log, conversation_id, events, key=key, condition=condition, seen_id=seen_id, fields=fields
            )
        except UnknownConversation:
            if await self.is_archived(conversation_id):
                raise IsArchived(conversation_id) from None
            raise


def to_model_switch(model: str | None, *, by: str = "", reason: str = "") -> tuple[Event, ...]:
    """Return the event that switches to a model, in a list; empty if no model is named."""
    if not model:
        return ()
    who, why = check_note(by, "by"), check_note(reason, "reason")
    return (ModelSwitched(model=model, reason=why or "", by=who, source=EventSource.USER),)


async def build_answer(
    store: Store, conversation_id: str, answer: AgentState, action_id: int | None, edited: Mapping[str, Any]
) -> ChangeAgentStateAction:
    """Return the event that answers a conversation's pending confirmation.

    Args:
        action_id: the action that was shown to the user; None for the pending one.

    Raises:
        UsageError: no action is pending, or another one is.
    """
    state, asked_id = await find_pending_confirmation(store, conversation_id)
    if state != AgentState.AWAITING_USER_CONFIRMATION or action_id not in (None, asked_id):
        asked = f"about action {asked_id}" if asked_id else f"nothing: it is {state}"
        raise UsageError(
            f"The conversation {conversation_id} asks {asked}.", remedy="`deckhands show` prints its question."
        )
    return ChangeAgentStateAction(agent_state=answer, action_id=asked_id, edited=dict(edited), source=EventSource.USER)


async def find_pending_confirmation(store: Store, conversation_id: str) -> tuple[str, int | None]:
    """Return the agent's state and the action that awaits confirmation; None for the action if there is none.

    Raises:
        UnknownConversation: no such conversation.
    """
    state = (await Conversations(store).load_row(conversation_id)).state
    if state != AgentState.AWAITING_USER_CONFIRMATION:
        return state, None
    announced = await find_latest_event(store, conversation_id, AgentStateChangedObservation)
    return (announced.agent_state, announced.action_id) if announced else (state, None)


async def append_as_producer(
    log: EventLog,
    conversation_id: str,
    events: Sequence[Event],
    *,
    key: str | None = None,
    condition: Condition = "",
    seen_id: int | None = None,
    fields: Mapping[str, str] | None = None,
) -> None:
    """Append events as a producer; `EventLog.append` lists the other errors.

    Args:
        log: the log that masks secrets, for text that a user wrote.
        seen_id: the required id of the last event; None for any.
        fields: fields of the index to write with the events.

    Raises:
        UsageError: the conversation is closed.
    """
    outcome = await log.append(conversation_id, events, key=key, condition=condition, seen_id=seen_id, fields=fields)
    if isinstance(outcome, Closed):
        raise UsageError(f"The conversation {conversation_id} is closed.", remedy="Submit the task as a new one.")
