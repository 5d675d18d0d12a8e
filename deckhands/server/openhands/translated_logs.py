"""The logs of conversations as OpenHands' events. A log is translated once, and new events are added later.

Besides the events of a log there are updates of the state: one whenever the agent's status changes, one for each field
that a change of the conversation affects, one for each message of the user, with its id, and one for each reply, with
the costs so far. They stand in the same order for every reader, because they follow from the log.

Holds: the same log gives the same events with the same ids, at every reading and every server.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any, Self
from uuid import NAMESPACE_URL, uuid5
from weakref import WeakValueDictionary

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationChanged,
    ConversationCreated,
    Event,
    ModelReply,
)
from broker.log import ConversationRow
from broker.runtime import UnknownConversation
from deckhands.client import Client
from deckhands.interop import SdkConversation, SdkPlace, announce_pause, to_uuid
from deckhands.server.openhands.states import IDLE, PAUSED, RunState

MAX_BYTES = 128 * 1024 * 1024
"""How much memory the events of all translations that a server keeps have, as JSON."""
MAX_LOG_BYTES = MAX_BYTES // 4
"""How much those of one conversation have; those of a longer one are made again for each request that lists them."""
MAX_FOLDED_EVENTS = 200_000
"""How many events the logs have whose states a server keeps, all together."""
EVENTS_PER_TURN = 100
"""How many events are translated before other requests have a turn."""
DEFAULT_DIRECTORY = "workspace/project"
_NAMESPACE = uuid5(NAMESPACE_URL, "urn:deckhands:openhands:updates")

Fields = dict[str, Any]


class TranslatedLog:
    """A log, translated up to one of its events.

    Attributes:
        has_events: whether it keeps its events, or only the state computed from them.
        run: whether the conversation runs.
        last: the last event that was added; None for none.
        events: those of OpenHands, in order.
        places: their places in the list, by id.
        sources: for each OpenHands event, the event of the log that completes it.
        size_bytes: the size of the events, as JSON.
    """

    def __init__(self, conversation_id: str, *, has_events: bool = False) -> None:
        self.conversation_id = conversation_id
        self.has_events = has_events
        self.size_bytes = 0
        self.run = RunState()
        self.last: Event | None = None
        self.events: list[Fields] = []
        self.places: dict[str, int] = {}
        self.sources: list[int] = []
        self._sdk = SdkConversation(conversation_id)
        self._status = IDLE

    @property
    def last_id(self) -> int:
        """The id of the last event that was added; 0 for none."""
        return self.last.id if self.last is not None else 0

    def add(self, event: Event) -> list[Fields]:
        """Add the next event, and return the events of OpenHands that follow from it."""
        self.last = event
        was_resting = self.run.is_held and self.run.status.state is AgentState.PAUSED
        self.run.add(event)
        if was_resting and isinstance(event, ChangeAgentStateAction) and self.run.execution_status == PAUSED:
            # The agent rests already, so it does not announce the pause.
            event = announce_pause(event)
        is_change = isinstance(event, AgentStateChangedObservation)
        is_hold = isinstance(event, AgentStateChangedObservation) and event.agent_state is AgentState.PAUSED
        is_hold = is_hold and self.run.is_held
        before = self._list_changeable() if isinstance(event, ConversationChanged) else {}
        found = [] if is_hold else self._add_message_ids(event, self._sdk.add(event))
        for key, value in self._list_changeable().items() if before else ():
            found += [self._make_update(event, key, value)] if value != before[key] else []
        if isinstance(event, ModelReply):
            found = [*found, self._make_update(event, "stats", self._sdk.sum_stats())]
        if is_change and self.run.execution_status != self._status:
            self._status = self.run.execution_status
            found = [*found, self._make_update(event, "execution_status", self._status)]
        for fields in found if self.has_events else ():
            self.places[fields["id"]] = len(self.events)
            self.events.append(fields)
            self.sources.append(event.id)
            self.size_bytes += len(json.dumps(fields))
        return found

    def _add_message_ids(self, event: Event, made: Sequence[Fields]) -> list[Fields]:
        """Return events with an update behind each message of the user."""
        found: list[Fields] = []
        for fields in made:
            found.append(fields)
            if fields["kind"] == "MessageEvent" and fields["source"] == "user":
                key, name = "last_user_message_id", fields["id"]
                found.append(self._make_update(event, key, name, part=name) | {"parent_id": name})
        return found

    def _list_changeable(self) -> Fields:
        """Return the fields of the state that a change may affect."""
        state = self._sdk.to_state(self._place)
        return {key: state[key] for key in ("agent", "max_iterations", "confirmation_policy", "tags")}

    async def add_all(self, events: Sequence[Event]) -> None:
        """Add the next events. Lets other tasks run meanwhile."""
        for number, event in enumerate(events, 1):
            self.add(event)
            if number % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def without_events(self) -> Self:
        """Return a copy of this log without its events. Afterwards, add no events to this object."""
        found = copy(self)
        found.has_events = False
        found.size_bytes = 0
        found.events = []
        found.places = {}
        found.sources = []
        return found

    def ends_run(self, event: Event) -> bool:
        """Return whether the run has ended with the event that was added last."""
        is_change = isinstance(event, AgentStateChangedObservation)
        return is_change and self.run.status.is_settled and self.run.execution_status != IDLE

    def fields(self) -> Fields:
        """Return the fields of the conversation's state."""
        return self._sdk.to_state(self._place) | self._own_fields()

    def info(self) -> Fields:
        """Return everything about the conversation, as its routes do."""
        return self._sdk.to_info(self._place, title=self.run.title or None) | self._own_fields() | self._relatives()

    def snapshot(self) -> Fields:
        """Return the update that has the whole state."""
        assert self.last is not None
        state = {name: value for name, value in self.fields().items() if value is not None}
        return self._make_update(self.last, "full_state", state)

    @property
    def _place(self) -> SdkPlace:
        created = self._sdk.created
        path = created.workspace.path if created is not None else None
        place = f"workspace/conversations/{to_uuid(self.conversation_id).hex}"
        return SdkPlace(path or DEFAULT_DIRECTORY, place)

    def _own_fields(self) -> Fields:
        return {"execution_status": self.run.execution_status}

    def _relatives(self) -> Fields:
        created = self._sdk.created
        assert created is not None
        origin, mark, _ = (created.forked_from or "").rpartition("@")
        found = {"forked_from_conversation_id": str(to_uuid(origin))} if mark else {}
        if created.parent is not None:
            found["parent_conversation_id"] = str(to_uuid(created.parent.conversation_id))
        return found | {"runtime_info": {"runtime_status": "available", "can_resume": True, "runtime_error": None}}

    def _make_update(self, event: Event, key: str, value: Any, *, part: str = "") -> Fields:
        moment = event.timestamp
        return {
            "kind": "ConversationStateUpdateEvent",
            "id": str(uuid5(_NAMESPACE, f"{self.conversation_id}/{event.id}/{key}{part}")),
            "timestamp": moment.replace(tzinfo=None).isoformat(timespec="microseconds") if moment else "",
            "source": "environment",
            "parent_id": self._sdk.translation.leaf_id,
            "key": key,
            "value": value,
        }


def describe_row(row: ConversationRow, created: ConversationCreated, run: RunState) -> Fields:
    """Return the full description of a conversation in a listing, as its own route does.

    Args:
        created: its first event.
        run: whether the conversation runs.
    """
    log = TranslatedLog(row.conversation_id)
    log.add(created)
    model = row.model or "default"
    tokens = {name: int(row.fields.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    metrics = {
        "model_name": model,
        "accumulated_cost": row.cost_usd,
        "accumulated_token_usage": {"model": model, **tokens},
    }
    return log.info() | {
        "execution_status": run.execution_status,
        "title": row.title or None,
        "tags": dict(row.labels),
        "created_at": row.created.isoformat(),
        "updated_at": row.updated.isoformat(),
        "metrics": metrics,
        "stats": {"usage_to_metrics": {"agent": metrics}},
    }


class TranslatedLogs:
    """A server's cache of translated logs.

    States are small, so those of many conversations are kept; events are kept while there is room.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, TranslatedLog] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, client: Client, conversation_id: str, *, needs_events: bool = False) -> TranslatedLog:
        """Return a log, translated up to its end.

        Args:
            needs_events: whether the log must include its events.

        Raises:
            UnknownConversation: no such conversation.
        """
        lock = self._locks.get(conversation_id)
        if lock is None:
            self._locks[conversation_id] = lock = asyncio.Lock()
        async with lock:
            log = self._kept.pop(conversation_id, None)  # so that no other request drops its events meanwhile
            if log is None or (needs_events and not log.has_events) or not await self._continue(client, log):
                log = TranslatedLog(conversation_id, has_events=needs_events)
                await log.add_all(await client.events(conversation_id, is_whole=True, is_lenient=True))
            if log.last is None:
                raise UnknownConversation(conversation_id)
            self._keep(log)
            return log

    async def _continue(self, client: Client, log: TranslatedLog) -> bool:
        """Add the events that were appended to a log since, and return whether it is still the same log."""
        last = log.last
        assert last is not None
        found = await client.events(log.conversation_id, after=last.id - 1, is_whole=True, is_lenient=True)
        if not found or not _is_same(found[0], last):  # its end was lost, or it is another one
            return False
        await log.add_all(found[1:])
        return True

    def _keep(self, log: TranslatedLog) -> None:
        """Keep a log, and drop the oldest ones if there is no room."""
        self._kept[log.conversation_id] = log
        while len(self._kept) > 1 and sum(kept.last_id for kept in self._kept.values()) > MAX_FOLDED_EVENTS:
            self._kept.popitem(last=False)
        if log.size_bytes > MAX_LOG_BYTES:
            self._kept[log.conversation_id] = log.without_events()
        size_bytes = sum(kept.size_bytes for kept in self._kept.values())
        for kept in list(self._kept.values()):
            if size_bytes <= MAX_BYTES:
                return
            size_bytes -= kept.size_bytes
            self._kept[kept.conversation_id] = kept.without_events()


def _is_same(event: Event, known: Event) -> bool:
    return (event.id, event.kind, event.timestamp) == (known.id, known.kind, known.timestamp)
