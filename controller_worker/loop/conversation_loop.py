"""The loop of one conversation: claim, fold, ask the core, perform, append, wait.

While it waits for a tool or a user, a conversation is an object with no asyncio task. After a while it is released and
uses no memory. Only a model call keeps a task.

Holds: a conversation with another owner is dropped at once and writes nothing. An unforeseen error becomes an event of
its conversation and affects no other. At the deadline of a conversation with a time limit, an alarm ends a tool or a
model call in flight.
Does not: retry model calls by sleeping. A failed call is an event with the time of the next attempt, and the
conversation is parked until then.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable

from broker.contract import AgentState, PartyStopped, is_settled
from broker.coordination import CarriedEvent, ClaimedConversation, CrashAttribution
from broker.runtime import CONVERSATION, Clock, DeckhandsError, OwnershipLost
from controller_worker.core import Append, Commit, State, find_decision_name, is_call_ending, next_effect
from controller_worker.loop.call_in_flight import CallInFlight
from controller_worker.loop.failed_conversation import rest_in_error
from controller_worker.loop.owned_log import Gone, OwnedLog, TakenOver
from controller_worker.loop.performer import NextMove, Performer
from controller_worker.loop.sdk.session import SdkSession
from controller_worker.loop.services import Services

_log = logging.getLogger(__name__)

MAX_ROUNDS = 16
"""Rounds in which neither the log grows nor a side effect runs. One or two are usual; more mean an endless loop."""

STOP_SECONDS = 5.0
"""How long the end of a stopped model call is awaited. One that continues, like a thread, is not reported."""

FORGET_HISTORY_AFTER_SECONDS = 20.0
"""A call that has taken so long may take as long again. Reading the log again costs milliseconds."""


class Alarm:
    """Rings when the conversation's time is up."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, state: State) -> None:
        """Set the alarm to the conversation's deadline, if it works and has one. This replaces an earlier setting."""
        self.cancel()
        deadline = state.usage.deadline
        if deadline is not None and not is_settled(state.lifecycle.agent_state):
            left = (deadline - self._clock.now()).total_seconds()
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._ring)

    def cancel(self) -> None:
        """Cancel the alarm."""
        if self._timer is not None:
            self._timer.cancel()


def make_waker(loop: ConversationLoop) -> Callable[[], None]:
    """Return a function that lets the loop continue, without a strong reference to it.

    Parts of the loop hold the function. If it referred to the loop, each released conversation would stay in memory
    until the next full garbage collection, which is rare in a worker.
    """
    found = weakref.ref(loop)

    def wake() -> None:
        if (loop := found()) is not None:
            loop.wake(has_new_events=False)

    return wake


def make_continuation(loop: ConversationLoop) -> Callable[[], Awaitable[None]]:
    """Return a function that runs the loop in the task that awaits it, without a strong reference to the loop."""
    found = weakref.ref(loop)

    async def proceed() -> None:
        if (loop := found()) is not None:
            await loop.proceed()

    return proceed


class ConversationLoop:
    """One conversation owned by this worker.

    Attributes:
        is_to_begin_again: after a drop, check whether this worker still owns the conversation. Set if its log has lost
            its tail; if the store was unavailable, because an older state of it may name this worker as the owner under
            another token; or if the conversation could not be released because new events kept arriving.
        is_lost: it has another owner.
        rank: of its priority; 0 goes first.
    """

    def __init__(
        self, claimed: ClaimedConversation, services: Services, *, on_gone: Callable[[ConversationLoop], None]
    ) -> None:
        self.conversation_id = claimed.ownership.conversation_id
        self.should_reclaim = False
        self.is_lost = False
        self.rank = claimed.rank
        self._turn = services.steps.make_turn(claimed)
        self._services = services
        self._on_gone = on_gone
        self._is_gone = False
        self._commit: Commit | None = None
        self._task: asyncio.Task[None] | None = None
        continue_loop = make_waker(self)
        self._alarm = Alarm(services.store.clock, continue_loop)
        self._log = OwnedLog(claimed, services)
        self._crash_guard = CrashAttribution(services.turns, self._log.mark, deaths=claimed.crashes)
        self._call = CallInFlight(services, claimed.ownership, on_answer=make_continuation(self))
        self._sdk = SdkSession(services.sdk_sessions, services.log, self.conversation_id, continue_loop)
        self._log.on_events = self._sdk.process
        self._performer = Performer(self._log, self._call, self._sdk, services, self._crash_guard)

    @property
    def state(self) -> State:
        """The state of the conversation, up to the last event read."""
        return self._log.state

    @property
    def waiting_since(self) -> float:
        """When the log last grew, by the monotonic clock."""
        return self._log.waiting_since

    @property
    def is_idle(self) -> bool:
        """Whether the conversation has nothing to do before its next event."""
        is_at_work = self._call.is_running or self._sdk.is_awaited
        return (self._task is None or self._task.done()) and not is_at_work

    def start(self) -> asyncio.Task[None]:
        """Claim the conversation. The returned task ends when there is nothing to do before the next event."""
        self._task = asyncio.create_task(self._run(), name=f"begin {self.conversation_id}")
        return self._task

    def wake(self, *, has_new_events: bool = True, carried: CarriedEvent | None = None) -> None:
        """Read new events, then perform the effects.

        Args:
            carried: the only new event, if it was delivered with the notification.
        """
        if self._is_gone:
            return  # this worker must not start another model call beside the new owner
        if carried is not None:
            self._log.keep_carried(carried)
        else:
            self._log.has_new_events = self._log.has_new_events or has_new_events
        self._call.permit.wake()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"step {self.conversation_id}")

    async def proceed(self) -> None:
        """Continue in the current task, whose model call has ended: a task less, and a turn of the event loop less."""
        if self._is_gone:
            return
        self._call.permit.wake()
        if self._task is None or self._task.done():
            self._task = asyncio.current_task()
            await self._run()

    def check_dispatch(self) -> None:
        """Ensure that a tool worker has the pending actions, and that delegates are running."""
        self._performer.repeat_all()
        self.wake()

    async def release_idle(self) -> None:
        """Release an idle conversation; its next event brings it back to any worker."""
        if self.is_idle and not self._is_gone:
            self._task = asyncio.create_task(self._run(is_release=True), name=f"release {self.conversation_id}")
            await self._task

    async def check_lost_tail(self, error: Exception | None = None) -> bool:
        """Return whether the log has lost events that were read, and record the gap.

        `error` may have been caused by it.
        """
        is_lost = await self._log.record_lost_tail(error)
        self.should_reclaim = is_lost or self._log.has_reconnected
        return is_lost

    def forget_history(self, now: float) -> None:
        """Free the decoded log while the model thinks for long; the next prompt reads it again.

        Args:
            now: by the monotonic clock.
        """
        if self._task is None and self._call.is_running and now - self.waiting_since > FORGET_HISTORY_AFTER_SECONDS:
            self._log.recollection.forget()

    def drop(self) -> None:
        """Drop the conversation without appending anything."""
        self._is_gone = True
        self._alarm.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._crash_guard.end_turn()
        self._call.abandon(self.state)
        self._sdk.close()
        self._on_gone(self)

    async def _run(self, *, is_release: bool = False) -> None:
        CONVERSATION.set(self.conversation_id)
        try:
            if is_release:
                await self._crash_guard.mark_acting()
                await self._performer.release()
            await self._advance()
            self._alarm.set(self.state)
        except (Gone, OwnershipLost) as error:
            self.is_lost = not isinstance(error, Gone) or isinstance(error, TakenOver)
            await self.check_lost_tail()
            self.drop()
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
            if not await self.check_lost_tail(error) and not await rest_in_error(self._services, self._log, error):
                self.should_reclaim = True
            self.drop()
        finally:
            if self._task is asyncio.current_task():
                self._task = None  # a finished task keeps its coroutine

    async def _advance(self) -> None:
        """Perform effects until the conversation must wait. Other conversations may step in between."""
        await self._turn.take()
        try:
            await self._step_on()
        finally:
            self._turn.give()

    async def _step_on(self) -> None:
        seen = (-1, 0)
        rounds = 0
        while True:
            await self._catch_up()
            before, seen = seen, (self.state.version, len(self._performer.done))
            rounds = rounds + 1 if seen == before else 0
            if rounds >= MAX_ROUNDS:
                concern = find_decision_name(self.state, self._services.store.clock.now())
                raise AssertionError(f"endless loop of the decision {concern} at version {self.state.version}")
            if not await self._step():
                await self._crash_guard.mark_waiting()
                has_news = self._log.has_news, self._call.take_news(), self._sdk.take_news()
                if not any(has_news):
                    return
                rounds = -1
            await self._turn.take_next()

    async def _catch_up(self) -> None:
        """Restore the log on the first call; fold in new events on later ones."""
        await self._crash_guard.mark_acting()
        if not self._log.is_restored:
            await self._log.restore()
            await self._call.permit.charge_unsettled(self.state)
        await self._log.catch_up()

    async def _step(self) -> bool:
        """Append the model's answer, or perform the next effect. Return False if the conversation must wait."""
        answer = self._call.answer
        state = self.state
        if answer is not None:
            wanted = await self._call.make_events(answer, state, self._log.agent)
            if wanted is not None and await self._append(wanted):
                await self._call.end(answer, self.state)
            return True
        commit, self._commit = self._commit, None  # its decision is used once: a later one may depend on the time
        decided = commit.effect if commit is not None and commit.state is state else None
        effect = next_effect(state, self._services.store.clock.now(), self._performer.done, decided=decided)
        then = await self._performer.perform(effect)
        if isinstance(then, Append):
            await self._append(then)
        return then is not NextMove.WAIT

    def _report_stop(self, call: asyncio.Task[None] | None) -> None:
        """Report the end of a model call that was stopped by a request; None if none was in flight.

        This runs beside the loop: the conversation continues or is released even if the call ends slowly.
        """
        if call is not None:
            key = f"party_stopped:model:{self.state.version}"
            self._services.permits.release_later(self._append_stop(call, key))

    async def _append_stop(self, call: asyncio.Task[None], key: str) -> None:
        """Append the end of a stopped call.

        It is appended as a producer, because the conversation may have another owner by then.
        """
        began = self._services.store.clock.monotonic()
        if not (await asyncio.wait([call], timeout=STOP_SECONDS))[0]:
            return
        stopped = PartyStopped(party="model", seconds=round(self._services.store.clock.monotonic() - began, 3))
        try:
            await self._services.log.append(self.conversation_id, [stopped], key=key, quiet=True)
        except DeckhandsError as error:  # the call has ended anyway
            _log.warning("the end of a stopped call of %s is not recorded: %s", self.conversation_id, error)
        self._log.has_new_events = True

    async def _append(self, wanted: Append) -> bool:
        """Append; return False if the log has grown, so that the core must decide again."""
        before = self.state.lifecycle.agent_state
        commit = await self._log.append(wanted)
        if commit is None:
            return False
        if is_settled(after := self.state.lifecycle.agent_state) and after is not before:
            _log.info("conversation %s settles as %s at event %d", self.conversation_id, after, self.state.version)
        self._crash_guard.clear()  # an append clears the mark and the crash count
        self._performer.note_dispatched(commit)
        self._commit = commit
        if self.state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR):
            call = self._call.cancel(self.state)
            self._report_stop(call if self.state.lifecycle.agent_state is AgentState.STOPPED else None)
        elif any(map(is_call_ending, commit.events)):
            self._report_stop(await self._call.give_up(self.state))
        if not commit.is_partial:  # else it would keep all events of the remaining appends
            await self._log.save_snapshot()
        return True
