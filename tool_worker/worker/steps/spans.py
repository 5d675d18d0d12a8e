"""The tracing spans of a tool worker: one per action, and inside it one for its tool.

Does not: record commands, arguments or results, unless the operator asks for content; then with masked secrets.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from broker.contract import Action, ErrorObservation, Observation
from broker.coordination import ActionReclaimed
from broker.log import EventLog
from broker.runtime import DeckhandsError, OpenSpan, Tracing, Value, make_traceparent, render_content
from tool_worker.worker.steps.action_run import NOT_CONTENT, ActionRun, RestOfAction


class Spans:
    """Creates the spans of one worker if `tracing` is on."""

    def __init__(self, tracing: Tracing, worker_id: str, log: EventLog) -> None:
        self._log = log
        self._tracing = tracing
        self._worker_id = worker_id

    async def trace_action(self, run: ActionRun, rest: RestOfAction) -> Observation:
        """Create the span of an action. Its parent is the action's span, or else the conversation's."""
        if not self._tracing.is_on:
            return await rest(run)
        attributes: dict[str, Value] = {
            "gen_ai.conversation.id": run.conversation_id,
            "deckhands.action.id": run.delivery.action_id,
            "deckhands.attempt": run.claim.attempt if isinstance(run.claim, ActionReclaimed) else 1,
            "deckhands.worker.id": self._worker_id,
        }
        parent = None
        with suppress(DeckhandsError):  # an undecodable action has a span, too
            parent = run.event.traceparent if isinstance(run.event, Action) else None
        parent = parent or make_traceparent(run.conversation_id)
        with self._tracing.span("action", parent, kind="consumer", attributes=attributes) as span:
            run.traceparent = span.traceparent
            return await rest(run)

    async def trace_tool(self, run: ActionRun, rest: RestOfAction) -> Observation:
        """Create the span of the action's tool."""
        if not self._tracing.is_on:
            return await rest(run)
        action = run.action
        call = action.tool_call_metadata
        name = call.function_name if call is not None else action.kind
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
            "gen_ai.conversation.id": run.conversation_id,
            "deckhands.action.kind": action.kind,
        }
        if call is not None:
            attributes["gen_ai.tool.call.id"] = call.tool_call_id
        with self._tracing.span(f"execute_tool {name}", run.traceparent, attributes=attributes) as span:
            observation = await rest(run)
            span.add({"deckhands.observation.kind": observation.kind})
            if isinstance(observation, ErrorObservation):
                span.fail(observation.error_id or observation.kind)
            if span.captures_content:
                await self._add_content(span, run, observation)
            return observation

    async def _add_content(self, span: OpenSpan, run: ActionRun, observation: Observation) -> None:
        """Record the arguments and the result of a tool, if their secrets can be masked."""
        with suppress(DeckhandsError, RecursionError):  # a model chooses how deep its arguments are
            masker = await self._log.load_masker(run.conversation_id)
            arguments = {name: value for name, value in run.action.wire().items() if name not in NOT_CONTENT}

            def render() -> dict[str, Value]:
                return {
                    "gen_ai.tool.call.arguments": render_content(masker.mask_wire(arguments)),
                    "gen_ai.tool.call.result": render_content(masker.mask_text(observation.content)),
                }

            span.add(await asyncio.to_thread(render))
