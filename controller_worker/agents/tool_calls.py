"""What a model's tool calls mean: a reply to actions and observations (OpenHands 9.1).

Holds: every tool call of a reply leads to an action or, when it cannot be understood, to an `ErrorObservation` that
tells the model why; nothing a model writes raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from broker.actions import (
    AgentFinishAction,
    AgentThinkAction,
    CmdRunAction,
    FileEditAction,
    FileEditSource,
    FileReadAction,
    FileReadSource,
    MessageAction,
)
from broker.events import Action, ActionSecurityRisk, Event, EventSource, ModelReply, ModelToolCall, ToolCallMetadata
from broker.observations import AgentThinkObservation, ErrorObservation

THOUGHT_LOGGED = "Your thought has been logged."
EDITOR_ARGUMENTS = frozenset({"file_text", "old_str", "new_str", "insert_line"})


class ToolCallError(Exception):
    """A tool call that cannot be carried out; the text is for the model."""


def events_of_reply(reply: ModelReply, tool_names: frozenset[str]) -> list[Event]:
    """Return what a reply leads to; see `Agent.events_of`."""
    if not reply.tool_calls:
        return [MessageAction(content=reply.content, source=EventSource.AGENT, wait_for_response=True)]
    events: list[Event] = []
    thought = reply.content
    for call in reply.tool_calls:
        metadata = ToolCallMetadata(
            function_name=call.name,
            tool_call_id=call.id,
            reply_id=reply.id,
            total_calls_in_response=len(reply.tool_calls),
        )
        try:
            action = _action_of(call, tool_names)
        except ToolCallError as error:
            events.append(
                ErrorObservation(content=str(error), source=EventSource.AGENT, tool_call_metadata=metadata)
            )
            continue
        if thought:
            joined = f"{thought}\n{action.thought}" if action.thought else thought
            action = action.model_copy(update={"thought": joined})
            thought = ""
        events.append(action.model_copy(update={"tool_call_metadata": metadata}))
        if isinstance(action, AgentThinkAction):
            events.append(
                AgentThinkObservation(
                    content=THOUGHT_LOGGED,
                    source=EventSource.AGENT,
                    cause=reply.id + len(events),
                    tool_call_metadata=metadata,
                )
            )
    return events


def _action_of(call: ModelToolCall, tool_names: frozenset[str]) -> Action:
    convert = _CONVERTERS.get(call.name)
    if convert is None or call.name not in tool_names:
        raise ToolCallError(
            f"Tool {call.name} is not registered. (arguments: {call.arguments[:1000]}). "
            "Please check the tool name and retry with an existing tool."
        )
    try:
        arguments = json.loads(call.arguments or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolCallError(
            f"Failed to parse tool call arguments: {error}. Arguments: {call.arguments[:1000]}. "
            "Please write them again as one complete JSON object."
        ) from error
    if not isinstance(arguments, dict):
        raise ToolCallError(f"The arguments of {call.name} must be a JSON object, not {type(arguments).__name__}.")
    try:
        return convert(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ToolCallError(f"Invalid argument {where!r} in tool call {call.name}: {first['msg']}.") from error


def _run(arguments: Mapping[str, Any]) -> Action:
    timeout = arguments.get("timeout")
    if timeout is not None:
        try:
            timeout = float(timeout)
        except (TypeError, ValueError) as error:
            raise ToolCallError(
                f"Invalid float passed to 'timeout' argument: {arguments['timeout']!r}."
            ) from error
        if not 0 < timeout < float("inf"):
            raise ToolCallError(f"'timeout' must be a positive number of seconds, not {timeout}.")
    return CmdRunAction(
        command=_required(arguments, "command", "execute_bash"),
        is_input=str(arguments.get("is_input", "false")).lower() == "true",
        timeout=timeout,
        blocking=timeout is not None,
        security_risk=_risk(arguments),
    )


def _edit(arguments: Mapping[str, Any]) -> Action:
    command = _required(arguments, "command", "str_replace_editor")
    path = _required(arguments, "path", "str_replace_editor")
    if command == "view":
        return FileReadAction(
            path=path,
            impl_source=FileReadSource.OH_ACI,
            view_range=arguments.get("view_range"),
            security_risk=_risk(arguments),
        )
    ignored = {"command", "path", "view_range", "security_risk"}
    unknown = sorted(set(arguments) - EDITOR_ARGUMENTS - ignored)
    if unknown:
        raise ToolCallError(
            f"Unexpected argument {unknown[0]!r} in tool call str_replace_editor. "
            f"Allowed arguments are: {', '.join(sorted(EDITOR_ARGUMENTS | ignored))}."
        )
    return FileEditAction(
        path=path,
        command=command,
        impl_source=FileEditSource.OH_ACI,
        security_risk=_risk(arguments),
        **{name: arguments[name] for name in EDITOR_ARGUMENTS & set(arguments)},
    )


def _think(arguments: Mapping[str, Any]) -> Action:
    return AgentThinkAction(thought=_required(arguments, "thought", "think"))


def _finish(arguments: Mapping[str, Any]) -> Action:
    return AgentFinishAction(final_thought=_required(arguments, "message", "finish"))


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], Action]] = {
    "execute_bash": _run,
    "str_replace_editor": _edit,
    "think": _think,
    "finish": _finish,
}


def _required(arguments: Mapping[str, Any], name: str, tool: str) -> Any:
    if name not in arguments:
        raise ToolCallError(f'Missing required argument "{name}" in tool call {tool}')
    return arguments[name]


def _risk(arguments: Mapping[str, Any]) -> ActionSecurityRisk:
    """Return the model's own estimate; what is missing or invalid is unknown (OpenHands 9.1)."""
    return ActionSecurityRisk.__members__.get(str(arguments.get("security_risk")), ActionSecurityRisk.UNKNOWN)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
