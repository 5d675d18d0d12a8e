"""Performs the effects of one conversation: a table from each class of effect to its method.

A method returns events to append, or a `NextMove`: ask the core again at once, or wait for the next event.

Holds: performing an effect twice is harmless, because the first time may have been before a crash. If an awaited action
is not on an action stream, it is put there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar

from broker.contract import AgentState, ConversationStarted, ManageDelegatesAction, Observation, Ownership
from broker.coordination import CrashAttribution, DispatchOutcome, Owners, StartStatus
from broker.log import EXPIRED_CODE, NOT_STARTED, EventLog
from broker.runtime import OwnershipLost
from controller_worker.agents import is_sdk_agent
from controller_worker.core import (
    Append,
    AwaitDelegates,
    AwaitStart,
    AwaitTools,
    CallModel,
    CarryOut,
    Commit,
    Effect,
    Greet,
    ManageDelegates,
    NotifyDelegates,
    Park,
    Recall,
    Rest,
    SideEffect,
    StartDelegate,
    TakeNote,
    announce,
    find_recheck_time,
    find_side_effects,
    needs_verdict,
    to_answer,
)
from controller_worker.loop.answers import answer_effect, make_greeting, read_event
from controller_worker.loop.call_in_flight import CallInFlight
from controller_worker.loop.delegates import Delegates
from controller_worker.loop.owned_log import OwnedLog
from controller_worker.loop.sdk.session import SdkSession
from controller_worker.loop.services import Services
from controller_worker.model import Started


class NextMove(Enum):
    """The next move of the loop after an effect without events to append."""

    ASK_AGAIN = "ask again"
    WAIT = "wait"


class Dispatches:
    """The awaited actions of one conversation."""

    def __init__(self, log: EventLog, owners: Owners, ownership: Ownership) -> None:
        self._log = log
        self._owners = owners
        self._ownership = ownership
        self._known: frozenset[int] = frozenset()  # an empty one takes no memory

    def note(self, action_ids: Iterable[int]) -> None:
        """Record actions that were dispatched by the append that wrote them."""
        self._known |= set(action_ids)

    def forget(self) -> None:
        """Forget the checks, so that the next wait checks all actions again."""
        self._known = frozenset()

    async def ensure(self, action_ids: tuple[int, ...]) -> bool:
        """Ensure that a tool worker has the actions. Return False if one of them is settled already.

        Raises:
            OwnershipLost: the conversation has another owner.
        """
        conversation_id = self._ownership.conversation_id
        for action_id in action_ids:
            if action_id in self._known:
                continue
            entry = await self._log.load_entry(conversation_id, action_id)
            pool = (await self._log.decode_entry(conversation_id, entry, action_id)).required_pool
            outcome = await self._owners.dispatch(self._ownership, action_id, entry, pool=pool)
            if outcome is DispatchOutcome.FENCED:
                raise OwnershipLost(f"The conversation {conversation_id} has another owner.")
            if outcome is DispatchOutcome.SETTLED:
                return False
            self._known |= {action_id}
        self._known &= set(action_ids)
        return True


class Performer:
    """Performs the effects of one conversation.

    Attributes:
        done: the side effects that this owner has run, which the log does not record.
    """

    def __init__(
        self, log: OwnedLog, call: CallInFlight, sdk: SdkSession, services: Services, suspicion: CrashAttribution
    ) -> None:
        self.done: set[SideEffect] = set()
        self._log = log
        self._call = call
        self._sdk = sdk
        self._services = services
        self._crash_guard = suspicion
        self._started: dict[int, Observation] = {}  # answers to delegate actions, until they are in the log
        self._delegates = Delegates(services.log, services.store, services.models)
        self._dispatches = Dispatches(services.log, services.owners, log.ownership)

    async def perform(self, effect: Effect) -> Append | NextMove:
        """Perform an effect; return the events to append, or how the loop continues."""
        return await self._METHODS[type(effect)](self, effect)

    def note_dispatched(self, commit: Commit) -> None:
        """Record the actions that the append has dispatched to tool workers."""
        self._dispatches.note(commit.events[position].id for position in commit.dispatch)

    def repeat_all(self) -> None:
        """Repeat every side effect and check every action again, because the store may have lost them."""
        self.done.clear()
        self._started.clear()
        self._dispatches.forget()

    async def release(self) -> NextMove:
        """Release the conversation while it waits for a tool, a delegate or a permit; see `OwnedLog.release`."""
        is_refused = self._call.permit.is_refused
        now = self._services.store.clock.now()
        await self._log.release(find_recheck_time(self._log.state, now, is_refused=is_refused))
        return NextMove.ASK_AGAIN

    async def _append(self, wanted: Append) -> Append:
        return wanted

    async def _greet(self, _: Greet) -> Append:
        return make_greeting(self._log.agent, self._log.state)

    async def _answer(self, wanted: Recall | CarryOut | TakeNote) -> Append:
        services = self._services
        return await answer_effect(services.log, services.notebooks, services.hooks, self._log.state, wanted)

    async def _await_start(self, _: AwaitStart) -> Append | NextMove:
        services = self._services
        log = self._log
        status = await services.owners.check_start(log.ownership)
        if status is StartStatus.DUE:
            return Append((ConversationStarted(),))
        if isinstance(status, StartStatus):
            return announce(log.state, AgentState.ERROR, NOT_STARTED, code=EXPIRED_CODE)
        await log.release(services.store.clock.now() + timedelta(seconds=status))
        return NextMove.ASK_AGAIN

    async def _await_tools(self, wanted: AwaitTools) -> NextMove:
        if await self._dispatches.ensure(wanted.action_ids):
            await self._crash_guard.acquit()
            return NextMove.WAIT
        self._log.has_new_events = True
        return NextMove.ASK_AGAIN

    async def _await_delegates(self, _: AwaitDelegates) -> Append | NextMove:
        """Start the delegates; append all immediate answers to their actions."""
        state = self._log.state
        waiting = [delegate for delegate in state.delegation.delegates if not delegate.is_answered]
        new = [one for one in waiting if one.id not in self._started and StartDelegate(one.id) not in self.done]
        for delegate, answer in zip(new, await self._delegates.start(state, new), strict=True):
            if answer is None:
                self.done.add(StartDelegate(delegate.id))
            else:
                self._started[delegate.id] = answer
        # Kept until the log has them: an append is refused if the log has grown, as it does when a delegate ends.
        self._started = {one.id: self._started[one.id] for one in waiting if one.id in self._started}
        if not self._started:
            await self._crash_guard.acquit()
            return NextMove.WAIT
        return Append(tuple(self._started.values()), tuple(enumerate(self._started)))

    async def _manage_delegates(self, wanted: ManageDelegates) -> Append:
        state = self._log.state
        action = await read_event(self._services.log, state.setup.conversation_id, wanted.action_id)
        assert isinstance(action, ManageDelegatesAction)
        done = await self._delegates.manage(state, action)
        return Append((to_answer(action, done),))

    async def _start_delegate(self, _: StartDelegate) -> NextMove:
        """Start all background delegates again, not only the one of this effect."""
        state = self._log.state
        due = [
            one.delegate_id
            for one in find_side_effects(state)
            if isinstance(one, StartDelegate) and one not in self.done
        ]
        await self._delegates.restart(state, due)
        self.done.update(map(StartDelegate, due))
        return NextMove.ASK_AGAIN

    async def _notify_delegates(self, errand: NotifyDelegates) -> NextMove:
        await self._delegates.notify(self._log.state, errand)
        self.done.add(errand)
        return NextMove.ASK_AGAIN

    async def _call_model(self, wanted: CallModel) -> Append | NextMove:
        log = self._log
        call = self._call
        if not call.permit.is_refused and not call.is_running:
            if is_sdk_agent(log.agent) and not needs_verdict(log.state):
                asks = await self._sdk.check_ask(wanted, log.state, log.agent)
                if not isinstance(asks, bool):
                    return asks
                if not asks:
                    return NextMove.WAIT
            outcome = await call.start(
                wanted,
                log.state,
                log.agent,
                log.recollection,
                is_watched=log.is_watched,
                before_waiting=self._crash_guard.mark_waiting,
                traceparent=log.traceparent,
            )
            if isinstance(outcome, Append):
                return outcome
            if isinstance(outcome, Started):
                return NextMove.WAIT
        # The log records a long wait, so the conversation can be released: a wake-up brings it back on any worker.
        permit = call.permit
        is_long = permit.is_refused and not permit.is_woken and log.state.calls.deferral is not None
        return await self.release() if is_long else NextMove.WAIT

    async def _end_work(self, wanted: Park | Rest) -> NextMove:
        if self._call.is_running:
            return NextMove.WAIT  # a pause keeps the running call: its answer is paid for and will be appended
        await self._call.permit.withdraw(self._log.state)
        await self._log.release(wanted.until if isinstance(wanted, Park) else None)
        return NextMove.ASK_AGAIN

    _METHODS: ClassVar[Mapping[type, Callable[[Performer, Any], Awaitable[Append | NextMove]]]] = {
        Append: _append,
        Greet: _greet,
        Recall: _answer,
        CarryOut: _answer,
        TakeNote: _answer,
        ManageDelegates: _manage_delegates,
        AwaitStart: _await_start,
        AwaitTools: _await_tools,
        AwaitDelegates: _await_delegates,
        StartDelegate: _start_delegate,
        NotifyDelegates: _notify_delegates,
        CallModel: _call_model,
        Park: _end_work,
        Rest: _end_work,
    }
