"""The shell around the core: performs what is wanted for one conversation and appends what came of it.

Between two pieces of news a conversation is an object without a task: waiting for a tool or a person costs memory
only, and after a while not even that. A model call is the only thing that keeps a task.

Holds: every decision rests on the log up to `state.version`, and is appended only if the log still holds that event and
has not grown since; a
turn is appended whole, with the reply that led to it; a fenced conversation is dropped at once and writes nothing; an
error that nobody foresaw becomes an event of its conversation and touches no other.
Does not: retry model calls by sleeping. A failed call is an event with the time of the next one, and the conversation
is parked until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from broker.contract.actions import CondensationAction
from broker.contract.agent_state import AgentState, is_settled
from broker.contract.events import Event, ModelCallDeferred
from broker.coordination.crash_attribution import CrashAttribution
from broker.coordination.ownership import Claimed
from broker.log.event_log import Appended, Closed, Conflict, Duplicate
from broker.runtime.errors import DeckhandsError, EventsLost, OwnershipLost
from broker.runtime.failpoints import failpoint
from controller_worker.agents.agent import Agent
from controller_worker.agents.registry import create_agent
from controller_worker.calls.call_gate import CallGate
from controller_worker.calls.model_answer import ModelAnswer, asked
from controller_worker.calls.question import Question, next_question
from controller_worker.calls.recollection import Recollection
from controller_worker.core.commit import Commit, index_fields, settle
from controller_worker.core.controller import fold, next_effect
from controller_worker.core.effects import (
    Append,
    AwaitDelegates,
    AwaitTools,
    CallModel,
    CarryOut,
    Effect,
    Greet,
    Park,
    Recall,
    TakeNote,
)
from controller_worker.core.model_calls import asks_again_at
from controller_worker.core.state import State
from controller_worker.loop.answering import answered, greeting
from controller_worker.loop.delegates import Delegates
from controller_worker.loop.dispatches import Dispatches
from controller_worker.loop.failed_conversation import rest_in_error
from controller_worker.loop.lost_tail import has_lost_tail
from controller_worker.loop.snapshots import EVERY_EVENTS, Snapshots
from controller_worker.services import Services

MAX_CRASHES = 3
MAX_ROUNDS_A_VERSION = 16
"""A log that does not grow needs one or two; more means that the same thing is wanted again and again."""

_log = logging.getLogger(__name__)


class _Gone(Exception):
    """The conversation was released, parked or taken over. Not an error."""


class ConversationLoop:
    """One conversation in the hands of this worker."""

    def __init__(self, claimed: Claimed, services: Services, *, on_gone: Callable[[ConversationLoop], None]) -> None:
        self.ownership = claimed.ownership
        self.state = State()
        self.waiting_since = services.store.clock.monotonic()
        self.is_to_begin_again = False
        self._checksum = ""
        self._connects = services.store.connection.connects
        self._claimed = claimed
        self._services = services
        self._on_gone = on_gone
        self._agent: Agent | None = None
        self._recollection = Recollection(services.log, claimed.ownership.conversation_id)
        self._delegates = Delegates(services.log, services.store)
        self._is_gone = False
        self._is_restored = False
        self._has_new_events = False
        self._is_watched = False
        self._task: asyncio.Task[None] | None = None
        self._call: asyncio.Task[None] | None = None
        self._gate = CallGate(services.gates, claimed.ownership)
        self._answer: ModelAnswer | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._dispatches = Dispatches(services.log, services.owners, claimed.ownership)
        self._snapshots = Snapshots(services, claimed)
        self._shown: dict[str, str | int | float] = {}
        self._attribution = CrashAttribution(services.turns, self._note_mark, deaths=claimed.crashes)

    @property
    def conversation_id(self) -> str:
        """Whose loop this is."""
        return self.ownership.conversation_id

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do before the next piece of news."""
        return (self._task is None or self._task.done()) and self._call is None

    def begin(self) -> asyncio.Task[None]:
        """Take it up; what is returned ends when there is nothing to do before the next piece of news."""
        self._task = asyncio.create_task(self._run(), name=f"begin {self.conversation_id}")
        return self._task

    def wake(self, *, has_new_events: bool = True) -> None:
        """Go on: read what is new, then do what is wanted."""
        if self._is_gone:
            return  # whoever owns it now must not be outbid by one more model call
        self._has_new_events = self._has_new_events or has_new_events
        self._gate.is_shut = False
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"step {self.conversation_id}")

    def check_dispatch(self) -> None:
        """Make sure that the actions waited for are really with a tool worker, and delegates at work."""
        self._dispatches.forget()
        self._delegates.forget()
        self.wake()

    async def look_back(self, error: Exception | None = None) -> bool:
        """Say whether the log has lost what was read of it, and name the gap there; `error` may be the sign of it."""
        services, version = self._services, self.state.version
        is_possible = isinstance(error, EventsLost) or self._connects != services.store.connection.connects
        if is_possible and version:  # a store loses nothing while one is connected
            self.is_to_begin_again = await has_lost_tail(services, self.conversation_id, version, self._checksum, error)
        return self.is_to_begin_again

    def drop(self) -> None:
        """Let go of the conversation without another word."""
        self._is_gone = True
        if self._alarm is not None:
            self._alarm.cancel()
        for task in (self._task, self._call):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._attribution.end_turn()
        self._gate.abandon(self.state)
        self._on_gone(self)

    async def release_idle(self) -> None:
        """Give up a conversation that only waits; its next piece of news brings it back, here or elsewhere."""
        if self.is_idle and not self._is_gone:
            self._task = asyncio.create_task(self._run(is_release=True), name=f"release {self.conversation_id}")
            await self._task

    async def _run(self, *, is_release: bool = False) -> None:
        try:
            if is_release:
                await self._release()
            await self._advance()
            while self._has_new_events or self._answer is not None:
                await self._advance()
            self._set_alarm()
        except (_Gone, OwnershipLost):
            await self.look_back()
            self.drop()
        except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an event)
            if await self.look_back(error):
                self.drop()
                return
            await self._fail(error)

    def _set_alarm(self) -> None:
        """See to it that what outlasts the time allowed is ended, be it a tool or the model."""
        if self._alarm is not None:
            self._alarm.cancel()
        deadline = self.state.usage.deadline
        if deadline is not None and not is_settled(self.state.lifecycle.agent_state):
            left = (deadline - self._services.store.clock.now()).total_seconds()
            self._alarm = asyncio.get_running_loop().call_later(max(left, 0.0), lambda: self.wake(has_new_events=False))

    async def _advance(self) -> None:
        """Do what is wanted until there is nothing left to do for now."""
        version, rounds = -1, 0
        while True:
            await self._catch_up()
            rounds = rounds + 1 if self.state.version == version else 0
            version = self.state.version
            assert rounds < MAX_ROUNDS_A_VERSION, f"no end to what is wanted at version {version}"
            if not await self._does_next():
                await self._attribution.rest()
                return

    async def _does_next(self) -> bool:
        """Do what is wanted now; False when it is only to wait."""
        if self._answer is not None:
            await self._take_answer(self._answer)
            return True
        await self._delegates.keep(self.state)
        await self._delegates.tell(self.state)
        effect = next_effect(self.state, self._services.store.clock.now())
        if isinstance(effect, Append):
            await self._commit(effect)
        elif isinstance(effect, Greet):
            assert self._agent is not None
            await self._commit(greeting(self._agent, self.state))
        elif isinstance(effect, Recall | CarryOut | TakeNote):
            services, state = self._services, self.state
            await self._commit(await answered(services.log, services.notebooks, services.hooks, state, effect))
        elif isinstance(effect, AwaitDelegates):
            if (wanted := await self._delegates.start(self.state, effect.delegate_ids)) is None:
                return False
            await self._commit(wanted)
        elif isinstance(effect, AwaitTools):
            if await self._dispatches.see_to(effect.action_ids):
                return False
            self._has_new_events = True
        elif isinstance(effect, CallModel):
            if not self._gate.is_shut or self.state.calls.gate is None:
                return await self._does_call(effect)
            await self._release()  # its call has to wait for long; it is woken wherever it is then
        elif self._call is not None:
            return False  # paused while the model thinks: its answer is paid for and will be kept
        else:
            await self._gate.withdraw(self.state)
            await self._release(effect)
        return True

    async def _catch_up(self) -> None:
        """Restore at first, then fold in what is new."""
        await self._attribution.act()
        if not self._is_restored:
            await self._restore()
        if self._has_new_events:
            self._has_new_events = False
            events, checksum = await self._read_new(after=self.state.version)
            await self._take_in(events, fold(self.state, events), checksum)

    async def _restore(self) -> None:
        """Fold the log from the latest snapshot, or from its beginning."""
        services, claimed = self._services, self._claimed
        if claimed.is_closed:
            await services.owners.release(self.ownership, seen_id=claimed.last_id)
            raise _Gone
        crashes = DeckhandsError(f"The conversation crashed its worker {claimed.crashes} times in a row.")
        if claimed.crashes > MAX_CRASHES:
            raise crashes  # to read it may be what kills
        failpoint("controller.after_claim")
        state = await self._snapshots.latest()
        # Read as news: a ring that came since the claim is answered by this, and the next event rings again.
        self._has_new_events = False
        tail, self._checksum = await self._read_new(after=state.version)
        self.state = fold(state, tail)
        self._is_restored = True
        if claimed.crashes == MAX_CRASHES:
            raise crashes  # now that it is known what is pending and has to be settled
        self._agent = create_agent(self.state.setup.agent)
        await self._gate.catch_up(self.state)

    async def _read_new(self, *, after: int) -> tuple[list[Event], str]:
        new = await self._services.log.read_new(self.ownership, after=after, checksum=self._checksum)
        self._is_watched = new.is_watched
        return new.events, new.checksum

    async def _take_in(self, events: list[Event], state: State, checksum: str) -> None:
        """Go on to the state after these events, and remember them for the next prompt."""
        await self._recollection.take_in(events)
        self._services.hooks.tell(self.state, events)
        if events:
            self.waiting_since = self._services.store.clock.monotonic()
        if state.setup.agent.name != self.state.setup.agent.name:
            self._agent = create_agent(state.setup.agent)
        self.state, self._checksum = state, checksum

    async def _commit(self, wanted: Append) -> None:
        """Append events and all that follows from them at once; if the log has grown, only read on."""
        services = self._services
        # Masked before anything is folded from it: what is in memory must be what the log says.
        masked = await services.log.mask(self.ownership.conversation_id, wanted.events)
        commit = settle(self.state, replace(wanted, events=masked.events), services.store.clock.now())
        fields = {name: value for name, value in index_fields(commit.state).items() if self._shown.get(name) != value}
        failpoint("controller.before_append")
        outcome = await services.log.append_as_owner(
            self.ownership,
            commit.events,
            expected_last_id=self.state.version,
            checksum=self._checksum,
            masked=masked,
            dispatch=commit.dispatch,
            answers=commit.answers,
            cancels=commit.cancels,
            fields=fields,
        )
        failpoint("controller.after_append")
        if isinstance(outcome, Conflict):
            self._has_new_events = True
            return
        if isinstance(outcome, Closed):
            await services.owners.release(self.ownership, seen_id=self.state.version)
        if not isinstance(outcome, Appended | Duplicate):
            _log.warning("conversation %s: fenced or closed at event %d", self.conversation_id, self.state.version)
            raise _Gone
        await self._after_commit(commit, outcome.checksum)
        self._shown |= fields

    async def _after_commit(self, commit: Commit, checksum: str) -> None:
        first_id = self.state.version + 1
        self._attribution.clear()  # an append takes the mark and the crashes away
        await self._take_in(commit.events, commit.state, checksum)
        self._dispatches.note(first_id + position for position in commit.dispatch)
        if self.state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR) and self._call is not None:
            self._call.cancel()
            self._call = self._answer = None
            self._gate.abandon(self.state)
        if self.state.version - self._snapshots.version >= EVERY_EVENTS:
            await self._save_snapshot()

    async def _does_call(self, effect: CallModel) -> bool:
        """Ask the model, or do what has to come before it; False if there is only to wait then."""
        if self._call is not None or self._gate.is_shut:
            return False
        if await self._gate.is_in_batch(self.state, effect):
            self._gate.is_shut = True
            return True
        assert self._agent is not None
        question = await next_question(self.state, self._agent, self._recollection, self._services.models)
        if isinstance(question, CondensationAction):
            await self._commit(Append((question,)))
            return True
        models, llm = self._services.models, question.llm
        await self._attribution.rest()  # for a client that is made, a seat, the model
        notice = await self._gate.knock(self.state, models.settings(llm), question.request, lambda: models.of(llm))
        if notice is not None:
            await self._commit(Append((notice,)))
            return True
        if self._gate.is_shut:
            return self.state.calls.gate is not None
        failpoint("controller.model_thinking")
        self._call = asyncio.create_task(self._ask_model(effect, question), name=f"model {self.conversation_id}")
        return False

    async def _ask_model(self, effect: CallModel, question: Question) -> None:
        """Call the model once and leave the answer for the loop."""
        answer = await asked(self._services, self._gate, self.state, effect, question, is_watched=self._is_watched)
        if self._call is not asyncio.current_task():
            return  # cancelled too late to notice; nobody waits for the answer any more
        self._call = None
        self._answer = answer
        self.wake(has_new_events=False)

    async def _take_answer(self, answer: ModelAnswer) -> None:
        """Append what the model answered, unless the conversation was stopped meanwhile."""
        version, agent = self.state.version, self._agent
        assert agent is not None
        if self.state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR):
            self._answer = None
            await self._gate.charge(self.state, None)
            return
        await self._commit(await self._services.hooks.reviewed(self.state, answer.events(self.state, agent)))
        if self.state.version > version:
            self._answer = None
            if isinstance(answer.result, ModelCallDeferred):
                self._gate.is_shut = True
            else:
                await self._gate.charge(self.state, answer.result)

    async def _release(self, effect: Effect | None = None) -> None:
        """Give the conversation up, parked if it waits for a time; stay if there is news."""
        if self.state.version > self._snapshots.version:
            await self._save_snapshot()
        await self._delegates.report(self.state)
        failpoint("controller.before_release")
        due = effect.until if isinstance(effect, Park) else None
        if effect is None:
            due = asks_again_at(self.state, self._services.store.clock.now(), is_shut=self._gate.is_shut)
        # The store counts from now: a millisecond more, because it must not be early by what is rounded.
        delay = None if due is None else (due - self._services.store.clock.now()).total_seconds() + 0.001
        news = await self._services.owners.release(
            self.ownership, seen_id=self.state.version, checksum=self._checksum, delay_seconds=delay
        )
        if news is None:
            raise _Gone
        self._has_new_events = True

    async def _save_snapshot(self) -> None:
        if not await self._snapshots.save(self.state, self._checksum):
            raise _Gone

    async def _note_mark(self, is_acting: bool) -> None:
        if not await self._services.owners.mark(self.ownership, is_stepping=is_acting):
            raise _Gone

    async def _fail(self, error: Exception) -> None:
        """Record an error that nobody foresaw, and give the conversation up until somebody speaks up."""
        services = self._services
        state = self.state if self._is_restored else None
        try:
            await rest_in_error(services.log, services.owners, self.ownership, state, error=error)
        finally:
            self.drop()
