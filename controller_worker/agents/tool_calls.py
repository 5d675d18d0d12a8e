"""Translate a reply's tool calls into actions and observations (OpenHands 9.1).

Holds: every tool call of a reply leads to an action or, if it is invalid, to an `ErrorObservation` with the cause for
the model. No reply raises, and no result is too large or too deeply nested for the log.
Differs: an invalid call gets its own answer and the reply's other calls are carried out; the original discards the
whole reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from broker.contract import (
    Action,
    ErrorObservation,
    Event,
    EventSource,
    MCPAction,
    MessageAction,
    ModelReply,
    ModelToolCall,
    TaskItem,
    TaskTrackingAction,
    ToolCallAction,
    ToolCallError,
    ToolCallMetadata,
    ToolOffer,
    ToolSpec,
    parse_json,
    with_fields,
)
from controller_worker.providers import remove_forced_nulls

MAX_CALLS = 128
MAX_ARGUMENTS_CHARS = 4_000_000
SHOWN_CHARS = 1_000


def parse_reply(reply: ModelReply, tools: Iterable[ToolSpec], task_list: Sequence[TaskItem] = ()) -> list[Event]:
    """Return the events of a reply; see `Agent.events_of`.

    Args:
        tools: the tools offered to the model.
        task_list: the task list before the reply.
    """
    if not reply.tool_calls:
        return [MessageAction(content=reply.content, source=EventSource.AGENT, wait_for_response=True)]
    events: list[Event] = []
    thought = reply.content
    offered = {tool.name: tool for tool in tools}
    for position, call in enumerate(reply.tool_calls):
        metadata = ToolCallMetadata(
            function_name=call.name,
            tool_call_id=call.id,
            reply_id=reply.id,
            total_calls_in_response=len(reply.tool_calls),
        )
        try:
            action = _parse_action(call, position, offered)
        except ToolCallError as error:
            events.append(ErrorObservation(content=str(error), source=EventSource.AGENT, tool_call_metadata=metadata))
            continue
        joined = f"{thought}\n{action.thought}" if thought and action.thought else thought or action.thought
        thought = ""
        events.append(with_fields(action, tool_call_metadata=metadata, thought=joined))
        answer = action.answer(task_list)
        if isinstance(action, TaskTrackingAction) and action.command == "plan":
            task_list = action.task_list
        if answer is not None:
            cause = reply.id + len(events)
            changes = {"source": EventSource.AGENT, "cause": cause, "tool_call_metadata": metadata}
            events.append(answer.model_copy(update=changes))
    return events


def make_offered_tool(offer: ToolOffer, name: str) -> ToolSpec:
    """Return a tool worker's offer as a tool for the model, under a name."""
    return replace(offer.spec, name=name, convert=partial(_make_tool_action, offer, name))


def _make_tool_action(offer: ToolOffer, name: str, arguments: Mapping[str, Any]) -> Action:
    # The tool itself reports arguments that do not fit its schema, in its author's words.
    fields: dict[str, Any] = {
        "name": name,
        "arguments": dict(arguments),
        "tool": offer.key,
        "fingerprint": offer.fingerprint,
        "pool": offer.pool,
    }
    return MCPAction(**fields, server=offer.server) if offer.runner == "mcp" else ToolCallAction(**fields)


def _parse_action(call: ModelToolCall, position: int, tools: Mapping[str, ToolSpec]) -> Action:
    if position >= MAX_CALLS:
        raise ToolCallError(f"Not carried out: a reply may hold {MAX_CALLS} tool calls. Call it again.")
    if call.problem:
        raise ToolCallError(call.problem)
    shown = call.arguments[:SHOWN_CHARS]
    tool = tools.get(call.name)
    if tool is None or tool.convert is None:
        raise ToolCallError(
            f"Tool {call.name[:100]} is not registered. (arguments: {shown}). "
            "Please check the tool name and retry with an existing tool."
        )
    if len(call.arguments) > MAX_ARGUMENTS_CHARS:
        raise ToolCallError(f"The arguments of {call.name} have more than {MAX_ARGUMENTS_CHARS:,} characters.")
    try:
        arguments = parse_json(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolCallError(
            f"Failed to parse tool call arguments: {error}. Arguments: {shown}. "
            "Please write them again as one complete JSON object."
        ) from error
    if not isinstance(arguments, dict):
        raise ToolCallError(f"The arguments of {call.name} must be a JSON object, not {type(arguments).__name__}.")
    try:
        if "null" in call.arguments:
            arguments = remove_forced_nulls(arguments, tool.parameters)
        action = tool.convert(arguments)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = first["loc"][0] if first["loc"] else ""
        raise ToolCallError(f"Invalid argument {where!r} in tool call {call.name}: {first['msg']}.") from error
    assert isinstance(action, Action)
    return action
