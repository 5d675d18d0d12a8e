"""The logs of conversations as OpenHands' events: translated once, and continued where they end.

Besides the events of a log there are updates of the state: one whenever the agent's status changes, and one for each
reply, with the costs so far. They stand in the same order for every reader, because they follow from the log.

Holds: the same log gives the same events with the same ids, however often it is read and by which server.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from broker.contract import AgentState, AgentStateChangedObservation, ConversationCreated, Event, ModelReply
from broker.log import ConversationRow
from broker.runtime import UnknownConversation
from deckhands.client import Client
from deckhands.interop import SdkConversation, SdkPlace
from deckhands.server.openhands.conversation_ids import to_uuid
from deckhands.server.openhands.states import IDLE, RunState

MAX_LOGS = 32
"""How many translations a server keeps."""
MAX_EVENTS = 20_000
"""How many events of all of them together."""
DEFAULT_DIRECTORY = "workspace/project"
CALL_LISTS = ("costs", "response_latencies", "token_usages")
"""The parts of metrics that grow with each call."""
_NAMESPACE = uuid5(NAMESPACE_URL, "urn:deckhands:openhands:updates")

Fields = dict[str, Any]


class TranslatedLog:
    """A log, translated up to one of its events.

    Attributes:
        run: whether it runs.
        last: the last event that was added; None for none.
        events: those of OpenHands, in order.
        places: their places in the list, by id.
        sources: for each of them, the event of the log after which it is there.
    """

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
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
        self.run.add(event)
        is_change = isinstance(event, AgentStateChangedObservation)
        is_hold = isinstance(event, AgentStateChangedObservation) and event.agent_state is AgentState.PAUSED
        is_hold = is_hold and self.run.is_held
        found = [] if is_hold else self._sdk.add(event)
        if isinstance(event, ModelReply):
            found = [*found, self._make_update(event, "stats", _without_calls(self.fields()["stats"]))]
        if is_change and self.run.execution_status != self._status:
            self._status = self.run.execution_status
            found = [*found, self._make_update(event, "execution_status", self._status)]
        for fields in found:
            self.places[fields["id"]] = len(self.events)
            self.events.append(fields)
            self.sources.append(event.id)
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
        return {"id": str(to_uuid(self.conversation_id)), "execution_status": self.run.execution_status}

    def _relatives(self) -> Fields:
        created = self._sdk.created
        assert created is not None
        origin, mark, _ = (created.forked_from or "").rpartition("@")
        found = {"forked_from_conversation_id": str(to_uuid(origin))} if mark else {}
        if created.parent is not None:
            found["parent_conversation_id"] = str(to_uuid(created.parent.conversation_id))
        return found | {"runtime_info": {"runtime_status": "available", "can_resume": True, "runtime_error": None}}

    def _make_update(self, event: Event, key: str, value: Any) -> Fields:
        moment = event.timestamp
        return {
            "kind": "ConversationStateUpdateEvent",
            "id": str(uuid5(_NAMESPACE, f"{self.conversation_id}/{event.id}/{key}")),
            "timestamp": moment.replace(tzinfo=None).isoformat(timespec="microseconds") if moment else "",
            "source": "environment",
            "parent_id": self._sdk.translation.leaf_id,
            "key": key,
            "value": value,
        }


def _without_calls(stats: Fields) -> Fields:
    """Return stats without the lists of single calls."""
    sums = {
        name: {key: part for key, part in metrics.items() if key not in CALL_LISTS}
        for name, metrics in stats["usage_to_metrics"].items()
    }
    return {"usage_to_metrics": sums}


def describe_row(row: ConversationRow, created: ConversationCreated, run: RunState) -> Fields:
    """Return everything that a listing knows about a conversation, as its route does.

    Args:
        created: its first event.
        run: whether it runs.
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
    """The translations that a server keeps, for requests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, TranslatedLog] = OrderedDict()

    async def load(self, client: Client, conversation_id: str) -> TranslatedLog:
        """Return a log, translated up to its end.

        Raises:
            UnknownConversation: no such conversation.
        """
        log = self._kept.get(conversation_id) or TranslatedLog(conversation_id)
        last = log.last
        after = log.last_id - 1 if last is not None else 0
        events = await client.events(conversation_id, after=after, is_whole=True, is_lenient=True)
        if log.last is not last:  # another request has continued it meanwhile
            return await self.load(client, conversation_id)
        if last is not None and not (events and _is_same(events[0], last)):  # its end was lost, or it is another one
            self._kept.pop(conversation_id, None)
            return await self.load(client, conversation_id)
        for event in events:
            if last is None or event.id > last.id:
                log.add(event)
        if log.last is None:
            raise UnknownConversation(conversation_id)
        self._keep(log)
        return log

    def _keep(self, log: TranslatedLog) -> None:
        self._kept[log.conversation_id] = log
        self._kept.move_to_end(log.conversation_id)
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_LOGS or sum(len(kept.events) for kept in self._kept.values()) > MAX_EVENTS
        ):
            self._kept.popitem(last=False)


def _is_same(event: Event, known: Event) -> bool:
    return (event.id, event.kind, event.timestamp) == (known.id, known.kind, known.timestamp)
