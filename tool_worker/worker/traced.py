"""The spans of a tool worker: one of each action, and in it one of the tool that runs.

Does not: write down commands, arguments or results.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from broker.contract.events import Action, Event, Observation
from broker.contract.observations import ErrorObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionReclaimed
from broker.coordination.crash_attribution import CrashAttribution
from broker.runtime.errors import DeckhandsError
from broker.runtime.tracing import Tracing, Value, traceparent_of, tracing
from tool_worker.worker.executor import Executor


@dataclass(frozen=True, slots=True)
class _Traced:
    """The action that a task carries out; `event` is None for one that cannot be read."""

    delivery: ActionDelivery
    event: Event | None
    traceparent: str | None


_ACTION: ContextVar[_Traced | None] = ContextVar("traced_action", default=None)


class TracedExecutor(Executor):
    """An executor that makes spans, if the process makes any.

    Args:
        spans: where they are made; None: where those of the process are.
    """

    def __init__(self, *arguments: Any, spans: Tracing | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tracing = spans or tracing("tool")

    async def _carry_out(
        self,
        delivery: ActionDelivery,
        claim: ActionClaimed | ActionReclaimed,
        attribution: CrashAttribution,
        refusal: DeckhandsError | None,
    ) -> None:
        if not self._tracing.is_on:
            await super()._carry_out(delivery, claim, attribution, refusal)
            return
        attributes: dict[str, Value] = {
            "gen_ai.conversation.id": delivery.conversation_id,
            "deckhands.action.id": delivery.action_id,
            "deckhands.attempt": claim.attempt if isinstance(claim, ActionReclaimed) else 1,
            "deckhands.worker.id": self._worker_id,
        }
        event: Event | None = None
        with suppress(DeckhandsError):
            event = super()._decoded(delivery)
        parent = _parent(event, delivery)
        with self._tracing.span("action", parent, kind="consumer", attributes=attributes) as span:
            token = _ACTION.set(_Traced(delivery, event, span.traceparent))
            try:
                await super()._carry_out(delivery, claim, attribution, refusal)
            finally:
                _ACTION.reset(token)

    def _decoded(self, delivery: ActionDelivery) -> Event:
        traced = _ACTION.get()
        if traced is not None and traced.delivery is delivery and traced.event is not None:
            return traced.event
        return super()._decoded(delivery)

    async def _run(
        self,
        delivery: ActionDelivery,
        action: Action,
        claim: ActionClaimed | ActionReclaimed,
        attribution: CrashAttribution,
    ) -> Observation:
        if not self._tracing.is_on:
            return await super()._run(delivery, action, claim, attribution)
        call = action.tool_call_metadata
        name = call.function_name if call is not None else action.kind
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.conversation.id": delivery.conversation_id,
            "deckhands.action.kind": action.kind,
        }
        if call is not None:
            attributes["gen_ai.tool.call.id"] = call.tool_call_id
        traced = _ACTION.get()
        parent = traced.traceparent if traced is not None else None
        with self._tracing.span(f"execute_tool {name}", parent, attributes=attributes) as span:
            observation = await super()._run(delivery, action, claim, attribution)
            span.add({"deckhands.observation.kind": observation.kind})
            if isinstance(observation, ErrorObservation):
                span.fail(observation.error_id or observation.kind)
            return observation


def _parent(action: Event | None, delivery: ActionDelivery) -> str:
    """Return the context of an action; of one that has none or cannot be read, that of its conversation."""
    found = action.traceparent if isinstance(action, Action) else None
    return found or traceparent_of(delivery.conversation_id)
