"""ConversationWindowCondenser: forgets the older half on request, without a model.

Holds: the system message, the task and its recall stay.
"""

from __future__ import annotations

from broker.contract import (
    CondensationAction,
    ConversationWindowCondenserSpec,
    Event,
    EventSource,
    MessageAction,
    Observation,
    RecallAction,
    RecallObservation,
    SystemMessageAction,
)
from controller_worker.memory.condensers.condenser import forgetting, with_results
from controller_worker.memory.view import View


class ConversationWindowCondenser:
    """Keeps the essential events and the newer half of the others."""

    type = "conversation_window"

    def __init__(self, spec: ConversationWindowCondenserSpec) -> None:
        self.spec = spec

    def condense(self, view: View) -> View | CondensationAction:
        """See `Condenser.condense`."""
        if not view.has_request:
            return view
        essential = _essential(view)
        others = [event for event in view.events if event.id not in essential and event.id > 0]
        if not essential:
            return forgetting(view, ())
        older = others[: len(others) - max(1, len(others) // 2)]
        newer = others[len(older) :]
        while newer and isinstance(newer[0], Observation):
            older.append(newer.pop(0))
        return forgetting(view, with_results(view, older))


def _essential(view: View) -> set[int]:
    """Return the ids of the events that always stay; none if there is no message yet."""
    task = next((e for e in view.events if isinstance(e, MessageAction) and e.source is EventSource.USER), None)
    if task is None:
        return set()
    kept: list[Event] = [event for event in view.events if isinstance(event, SystemMessageAction)]
    kept.append(task)
    recall = next((e for e in view.events if isinstance(e, RecallAction) and e.query == task.content), None)
    if recall is not None:
        kept.append(recall)
        kept += [e for e in view.events if isinstance(e, RecallObservation) and e.cause == recall.id]
    return {event.id for event in kept}
