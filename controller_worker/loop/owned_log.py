"""The log of one conversation, used by its owner: claim, restore, fold, append, snapshot, release.

Holds: every decision is based on the log up to `state.version`, and is appended only if the log still holds that event
and has not grown since. An append is written completely or not at all. A fenced owner writes nothing. A snapshot
belongs to a log that the store still has; a snapshot ahead of its log shows that the log has lost its tail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from broker.contract import (
    AgentStateChangedObservation,
    ConversationCreated,
    DelegateEnded,
    Event,
    ModelCallFailed,
    ModelReply,
    codec,
    is_settled,
)
from broker.coordination import PARSE_ERRORS, CarriedEvent, ClaimedConversation, Figures, Mark
from broker.log import (
    Appended,
    Closed,
    Conflict,
    Duplicate,
    check_event_exists,
    find_latest_model,
    record_gap,
    record_snapshot_gap,
)
from broker.runtime import DeckhandsError, EventsLost, Value, failpoint, make_traceparent, read_version
from controller_worker.agents import Agent, create_agent
from controller_worker.core import (
    EMPTY,
    Append,
    Commit,
    State,
    fold,
    parse_snapshot,
    settle,
    to_index_fields,
    to_snapshot,
)
from controller_worker.loop.answers import read_event
from controller_worker.loop.delegates import report_end
from controller_worker.loop.services import Services
from controller_worker.model import PromptHistory, name_provider

EVERY_EVENTS = 50
SHORT_EVENTS = 16
"""To fold so many events takes less time than to write a snapshot, or to read one."""
MAX_CRASHES = 3
NOTICED_BY = "a controller worker"
ANSWERED = "answered"

_log = logging.getLogger(__name__)


class Gone(Exception):
    """The conversation was released, parked or taken over."""


class TakenOver(Gone):
    """The conversation has another owner."""


class PinnedElsewhere(DeckhandsError):
    """The conversation is pinned to another version of Deckhands."""

    code = "pinned_version"


class Snapshots:
    """Reads and writes the latest snapshot of a conversation.

    Attributes:
        version: the version of the latest snapshot that this owner has read or written.
    """

    def __init__(self, services: Services, claimed: ClaimedConversation) -> None:
        self._services = services
        self._claimed = claimed
        self.version = 0

    async def load(self) -> State:
        """Return the state of the latest usable snapshot, or an empty state."""
        services = self._services
        claimed = self._claimed
        conversation_id = claimed.ownership.conversation_id
        state = parse_snapshot(await services.owners.load_snapshot(conversation_id)) or EMPTY
        if state.version > claimed.last_id:
            await record_snapshot_gap(services.log, conversation_id, state.version)
            state = EMPTY
        self.version = state.version
        return state

    async def save(self, state: State, checksum: str) -> bool:
        """Save a snapshot; return False if the conversation has another owner.

        Args:
            checksum: checksum of the last event in it.

        Raises:
            EventsLost: the log does not hold that event.
        """
        failpoint("controller.before_snapshot")
        ownership = self._claimed.ownership
        snapshot = to_snapshot(state)
        is_kept = await self._services.owners.save_snapshot(
            ownership, snapshot, seen_id=state.version, checksum=checksum
        )
        if is_kept:
            failpoint("controller.after_snapshot")
            self.version = state.version
        return is_kept


class OwnedLog:
    """The owner's view of a conversation's log.

    Attributes:
        state: the fold of the log so far.
        has_new_events: the log may have grown since.
        is_watched: a client follows replies while the model writes them.
        waiting_since: when the log last grew, by the monotonic clock.
        recollection: the part of the log that the model is shown.
        traceparent: the span of the claim; None without tracing.
        on_events: called with each event that is folded in after the log was restored.
    """

    def __init__(self, claimed: ClaimedConversation, services: Services) -> None:
        self.ownership = claimed.ownership
        self.state: State = EMPTY
        self.has_new_events = False
        self.is_watched = False
        self.is_restored = False
        self.waiting_since = services.store.clock.monotonic()
        self.recollection = PromptHistory(services.log, claimed.ownership.conversation_id)
        self.traceparent: str | None = None
        self.on_events: Callable[[list[Event]], None] = _ignore
        self._claimed = claimed
        self._services = services
        self._agent: Agent | None = None
        self._checksum = ""
        self._connects = services.store.connection.connects
        self._carried: list[CarriedEvent] = []
        self._snapshots = Snapshots(services, claimed)
        self._listed: dict[str, str | int | float] = {}
        self._has_unlisted_end = False

    @property
    def agent(self) -> Agent:
        """The current agent; set once the log is restored."""
        assert self._agent is not None
        return self._agent

    @property
    def has_reconnected(self) -> bool:
        """Whether the store was unavailable since the claim. Only then can it have lost events."""
        return self._connects != self._services.store.connection.connects

    @property
    def has_news(self) -> bool:
        """Whether there may be an event to fold in."""
        return self.has_new_events or bool(self._carried)

    def keep_carried(self, event: CarriedEvent) -> None:
        """Keep an event delivered with its notification; `catch_up` folds it in."""
        self._carried.append(event)

    async def restore(self) -> None:
        """Fold the log from the latest snapshot, or from its start.

        Raises:
            DeckhandsError: the conversation has crashed its workers too often.
            PinnedElsewhere: only workers of another version may continue it.
        """
        services = self._services
        claimed = self._claimed
        if claimed.is_closed:
            await services.owners.release(self.ownership, seen_id=claimed.last_id)
            raise Gone
        crashes = DeckhandsError(f"The conversation crashed its worker {claimed.crashes} times in a row.")
        if claimed.crashes > MAX_CRASHES:
            raise crashes  # reading it may be the cause of the crashes
        failpoint("controller.after_claim")
        begun = services.store.clock.now()
        state, tail = await self._load()
        self.state = fold(state, tail)
        if not state.version:
            await self.recollection.start(tail)
        self._has_unlisted_end = _has_delegate_end(tail)
        if self.state.setup.pinned_version not in ("", read_version()):
            raise PinnedElsewhere(f"It is pinned to version {self.state.setup.pinned_version}.")
        self.is_restored = True
        await self._trace(begun)
        if claimed.crashes == MAX_CRASHES:
            raise crashes  # now the pending actions to settle are known
        self._agent = create_agent(self.state.setup.agent)

    async def _load(self) -> tuple[State, list[Event]]:
        """Return the state of the latest snapshot and the events after it.

        A short log has no snapshot and is read completely.
        """
        # Reset before the read: it covers every wake-up sent since the claim, and the next event sends another one.
        self.has_new_events = False
        if self._claimed.last_id <= SHORT_EVENTS:
            new = await self._services.log.read_new(self.ownership, after=0, with_snapshot=True)
            if not new.snapshot:
                self.is_watched = new.is_watched
                self._checksum = new.checksum
                return EMPTY, new.events
        state = await self._snapshots.load()
        self.has_new_events = False
        tail, self._checksum = await self._read(after=state.version)
        return state, tail

    async def _trace(self, begun: datetime) -> None:
        """Start the span of the agent's work since this claim, in the trace of the submission."""
        tracing = self._services.tracing
        cid = self.ownership.conversation_id
        if not tracing.is_on:
            return
        created = await read_event(self._services.log, cid, 1)
        parent = created.traceparent if isinstance(created, ConversationCreated) else None
        spec = self.state.setup.agent
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": name_provider(self._services.models.find_settings(spec.llm)),
            "gen_ai.agent.name": spec.name,
            "gen_ai.request.model": spec.llm.model or "default",
            "gen_ai.conversation.id": cid,
            "deckhands.event.id": self.state.version,
            "deckhands.worker.id": self.ownership.worker_id,
        }
        with tracing.span(
            f"invoke_agent {spec.name}",
            parent or make_traceparent(cid),
            kind="consumer",
            attributes=attributes,
            begun=begun,
        ) as span:
            self.traceparent = span.traceparent

    async def catch_up(self) -> None:
        """Fold in new events: the carried one, or those read from the log."""
        carried, self._carried = self._carried, []
        for event in carried:
            if not self.has_new_events and event.event_id > self.state.version:
                await self._fold_carried(event)
        if self.has_new_events:
            self.has_new_events = False
            events, checksum = await self._read(after=self.state.version)
            await self._advance(events, fold(self.state, events), checksum)

    async def append(self, wanted: Append) -> Commit | None:
        """Append events together with their immediate consequences. None, without a write, if the log has grown.

        Raises:
            Gone: the conversation has another owner, or is closed.
        """
        services = self._services
        # Masked before the fold: the state in memory must equal that of the log.
        masked = await services.log.mask(self.ownership.conversation_id, wanted.events)
        now = services.store.clock.now()
        if masked.events is not wanted.events:
            wanted = replace(wanted, events=masked.events)
        commit = settle(self.state, wanted, now, traceparent=self.traceparent)
        answered = find_latest_model(commit.events)
        shown = to_index_fields(commit.state) | ({"model": answered} if answered else {})
        # A client's message changes `busy` too, so this owner's last written value may be outdated.
        fields = {name: value for name, value in shown.items() if name == "busy" or self._listed.get(name) != value}
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
            self.has_new_events = True
            return None
        if isinstance(outcome, Closed):
            await services.owners.release(self.ownership, seen_id=self.state.version)
        if not isinstance(outcome, Appended | Duplicate):
            raise Gone if isinstance(outcome, Closed) else TakenOver
        _count(services.figures, commit.events)
        await self._advance(commit.events, commit.state, outcome.checksum)
        self._listed |= fields
        self._has_unlisted_end = False
        return commit

    async def save_snapshot(self, *, every_events: int = EVERY_EVENTS) -> None:
        """Save a snapshot if the log has grown by this many events since the latest.

        Raises:
            Gone: the conversation has another owner.
        """
        is_due = self.state.version - self._snapshots.version >= every_events
        if is_due and not await self._snapshots.save(self.state, self._checksum):
            raise TakenOver

    async def release(self, due: datetime | None) -> None:
        """Release the conversation, parked until `due` if given; keep it if there are new events.

        Raises:
            Gone: it was released.
        """
        if self._has_unlisted_end:
            await self._list_delegate_end()
        if self.state.version > SHORT_EVENTS:
            await self.save_snapshot(every_events=1)
        await report_end(self._services.log, self.state)
        failpoint("controller.before_release")
        # The store counts from now. One more millisecond, because rounding must not wake it early.
        delay = None if due is None else (due - self._services.store.clock.now()).total_seconds() + 0.001
        news = await self._services.owners.release(
            self.ownership, seen_id=self.state.version, checksum=self._checksum, delay_seconds=delay
        )
        if news is None:
            raise Gone
        self.has_new_events = True

    async def _list_delegate_end(self) -> None:
        """Write a delegate's usage into the index if nothing was appended since, because its end may need no report."""
        outcome = await self._services.log.append_as_owner(
            self.ownership,
            (),
            expected_last_id=self.state.version,
            checksum=self._checksum,
            fields=to_index_fields(self.state),
        )
        self._has_unlisted_end = not isinstance(outcome, Appended)

    async def mark(self, mark: Mark) -> None:
        """Record in the store what a suspect does, see `CrashAttribution`.

        Raises:
            Gone: the conversation has another owner.
        """
        if not await self._services.owners.mark(self.ownership, mark):
            raise TakenOver

    async def record_lost_tail(self, error: Exception | None) -> bool:
        """Return whether the log has lost events that were read, and record the gap if so. Raises nothing.

        Afterwards, this owner must make no decision; the next owner reads the log.

        Args:
            error: an error that the loss may have caused.
        """
        store = self._services.store
        cid = self.ownership.conversation_id
        version = self.state.version
        known = error if isinstance(error, EventsLost) and error.conversation_id == cid else None
        # An owner that has read nothing has nothing to compare.
        is_possible = isinstance(error, EventsLost) or self.has_reconnected
        if known is None and not (is_possible and version):
            return False
        try:
            try:
                if known is not None:
                    raise known
                await check_event_exists(store, cid, version, self._checksum)
            except EventsLost as lost:
                _log.warning("conversation %s: %s", cid, lost.message)
                await record_gap(self._services.log, lost, noticed_by=NOTICED_BY)
                return True
        except (DeckhandsError, *PARSE_ERRORS) as other:  # the whole log is gone, or its keys are damaged
            _log.warning("conversation %s: %s", cid, other)
        return False

    async def _fold_carried(self, carried: CarriedEvent) -> None:
        """Fold in the carried event if it directly follows the last known one; else have the log read."""
        self.is_watched = carried.is_watched
        if carried.event_id == self.state.version + 1 and carried.before == self._checksum:
            try:
                event = await self._services.log.decode_entry(
                    self.ownership.conversation_id, carried.entry, carried.event_id
                )
            except DeckhandsError:
                pass  # `_read` decodes it again and reports the error
            else:
                await self._advance([event], fold(self.state, [event]), codec.checksum_of(carried.entry))
                return
        self.has_new_events = True

    async def _read(self, *, after: int) -> tuple[list[Event], str]:
        new = await self._services.log.read_new(self.ownership, after=after, checksum=self._checksum)
        self.is_watched = new.is_watched
        return new.events, new.checksum

    async def _advance(self, events: list[Event], state: State, checksum: str) -> None:
        """Move to the state after these events; add them to the next prompt and call the hooks for them."""
        await self.recollection.take_in(events)
        self.on_events(events)
        self._services.hooks.observe(self.state, events)
        if events:
            self.waiting_since = self._services.store.clock.monotonic()
        before = self.state.setup.agent
        self._has_unlisted_end |= _has_delegate_end(events)
        self.state = state
        self._checksum = checksum
        if state.setup.agent is not before:  # another agent, or other tools
            self._agent = create_agent(state.setup.agent)


def _has_delegate_end(events: Iterable[Event]) -> bool:
    return any(isinstance(event, DelegateEnded) for event in events)


def _ignore(_: list[Event]) -> None:
    """Ignore events."""


def _count(figures: Figures, events: Iterable[Event]) -> None:
    """Count an append for metrics: steps, calls, tokens, cost, settled conversations."""
    for event in events:
        if isinstance(event, ModelReply):
            _count_reply(figures, event)
        elif isinstance(event, ModelCallFailed):
            figures.add("model_calls", label=event.code)
        elif isinstance(event, AgentStateChangedObservation) and is_settled(event.agent_state):
            figures.add("settled", label=event.agent_state.value)


def _count_reply(figures: Figures, reply: ModelReply) -> None:
    if reply.service == "agent":
        figures.add("steps")
    figures.add("model_calls", label=ANSWERED)
    figures.add("model_seconds", reply.latency_seconds, reply.model)
    figures.add("cost_usd", reply.cost_usd or 0.0, reply.model)
    figures.add("prompt_tokens", reply.usage.prompt_tokens, reply.model)
    figures.add("completion_tokens", reply.usage.completion_tokens, reply.model)
    figures.add("cache_read_tokens", reply.usage.cache_read_tokens, reply.model)
    if reply.cost_usd is None:
        figures.add("calls_without_price", label=reply.model)
