"""What a model's tool calls mean: a reply to actions and observations (OpenHands 9.1).

Holds: every tool call of a reply leads to an action or, when it cannot be understood, to an `ErrorObservation` that
tells the model why; nothing a model writes raises, and nothing it writes is too large or too deep for the log.
Differs: a call that cannot be understood is answered by itself and the reply's other calls are carried out, because
the original throws the whole reply away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from broker.contract.actions import (
    AgentDelegateAction,
    AgentFinishAction,
    AgentThinkAction,
    BrowseInteractiveAction,
    CmdRunAction,
    CondensationRequestAction,
    IPythonRunCellAction,
    MCPAction,
    MessageAction,
    TaskItem,
    TaskTrackingAction,
    ToolCallAction,
)
from broker.contract.events import (
    Action,
    ActionSecurityRisk,
    Event,
    EventSource,
    ModelReply,
    ModelToolCall,
    Observation,
    ToolCallMetadata,
    replace_surrogates,
)
from broker.contract.file_events import FileEditAction, FileEditSource, FileReadAction, FileReadSource
from broker.contract.observations import AgentThinkObservation, ErrorObservation
from broker.contract.planning import PlanAction
from broker.contract.tool_specs import ToolOffer
from controller_worker.agents.call_arguments import ToolCallError, refuse_unknown, required_text
from controller_worker.agents.locating import (
    EXPLORE_TREE_STRUCTURE,
    GET_ENTITY_CONTENTS,
    SEARCH_CODE_SNIPPETS,
    code_search_action,
)
from controller_worker.agents.note_tool import note_action
from controller_worker.agents.searching import glob_action, grep_action, view_action
from controller_worker.agents.task_list import task_tracking_action, task_tracking_observation

MAX_CALLS = 128
MAX_ARGUMENTS_CHARS = 4_000_000
MAX_INTEGER_DIGITS = 18
SHOWN_CHARS = 1_000
THOUGHT_LOGGED = "Your thought has been logged."
EDITOR_ARGUMENTS = frozenset({"file_text", "old_str", "new_str", "insert_line"})


def events_of_reply(
    reply: ModelReply,
    tool_names: frozenset[str],
    offers: Mapping[str, ToolOffer] = MappingProxyType({}),
    *,
    task_list: Sequence[TaskItem] = (),
    hands_in: bool = False,
) -> list[Event]:
    """Return what a reply leads to; see `Agent.events_of`.

    Args:
        tool_names: of the agent's own tools.
        offers: tools that it may use besides, by name.
        task_list: as it is before the reply.
        hands_in: a finish has an output besides its words.
    """
    if not reply.tool_calls:
        return [MessageAction(content=reply.content, source=EventSource.AGENT, wait_for_response=True)]
    events: list[Event] = []
    thought = reply.content
    for position, call in enumerate(reply.tool_calls):
        metadata = ToolCallMetadata(
            function_name=call.name,
            tool_call_id=call.id,
            reply_id=reply.id,
            total_calls_in_response=len(reply.tool_calls),
        )
        try:
            action = _action_of(call, position, tool_names, offers, hands_in=hands_in)
        except ToolCallError as error:
            events.append(ErrorObservation(content=str(error), source=EventSource.AGENT, tool_call_metadata=metadata))
            continue
        if thought:
            joined = f"{thought}\n{action.thought}" if action.thought else thought
            action = action.model_copy(update={"thought": joined})
            thought = ""
        events.append(action.model_copy(update={"tool_call_metadata": metadata}))
        if isinstance(action, TaskTrackingAction):
            answer: Observation = task_tracking_observation(action, task_list)
            task_list = action.task_list if action.command == "plan" else task_list
        elif isinstance(action, AgentThinkAction):
            answer = AgentThinkObservation(content=THOUGHT_LOGGED)
        else:
            continue
        events.append(
            answer.model_copy(
                update={
                    "source": EventSource.AGENT,
                    "cause": reply.id + len(events),
                    "tool_call_metadata": metadata,
                }
            )
        )
    return events


def _action_of(
    call: ModelToolCall,
    position: int,
    tool_names: frozenset[str],
    offers: Mapping[str, ToolOffer],
    *,
    hands_in: bool,
) -> Action:
    if position >= MAX_CALLS:
        raise ToolCallError(f"Not carried out: a reply may hold {MAX_CALLS} tool calls. Call it again.")
    if call.problem:
        raise ToolCallError(call.problem)
    shown = call.arguments[:SHOWN_CHARS]
    convert = _CONVERTERS.get(call.name) if call.name in tool_names else None
    if call.name in offers:
        convert = partial(_offered, offers[call.name])
    elif convert is _finish and hands_in:
        convert = _finish_with_output
    if convert is None:
        raise ToolCallError(
            f"Tool {call.name[:100]} is not registered. (arguments: {shown}). "
            "Please check the tool name and retry with an existing tool."
        )
    if len(call.arguments) > MAX_ARGUMENTS_CHARS:
        raise ToolCallError(f"The arguments of {call.name} have more than {MAX_ARGUMENTS_CHARS:,} characters.")
    try:
        arguments = replace_surrogates(
            json.loads(call.arguments or "{}", parse_constant=_refuse_constant, parse_int=_integer)
        )
    except (ValueError, RecursionError) as error:
        raise ToolCallError(
            f"Failed to parse tool call arguments: {error}. Arguments: {shown}. "
            "Please write them again as one complete JSON object."
        ) from error
    if not isinstance(arguments, dict):
        raise ToolCallError(f"The arguments of {call.name} must be a JSON object, not {type(arguments).__name__}.")
    try:
        return convert(arguments)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = first["loc"][0]
        raise ToolCallError(f"Invalid argument {where!r} in tool call {call.name}: {first['msg']}.") from error


def _run(arguments: Mapping[str, Any]) -> Action:
    timeout = _seconds(arguments.get("timeout"))
    is_input = arguments.get("is_input")
    return CmdRunAction(
        command=required_text(arguments, "command", "execute_bash"),
        # Differs: true itself counts too, because a model that writes it does not mean a new command.
        is_input=is_input is True or is_input == "true",
        timeout=timeout,
        blocking=timeout is not None,
        security_risk=_risk(arguments),
    )


def _edit(arguments: Mapping[str, Any]) -> Action:
    command = required_text(arguments, "command", "str_replace_editor")
    path = required_text(arguments, "path", "str_replace_editor")
    if command == "view":
        return FileReadAction(
            path=path,
            impl_source=FileReadSource.OH_ACI,
            view_range=arguments.get("view_range"),
            security_risk=_risk(arguments),
        )
    ignored = {"command", "path", "view_range", "security_risk"}
    refuse_unknown(arguments, sorted(EDITOR_ARGUMENTS | ignored), "str_replace_editor")
    return FileEditAction(
        path=path,
        command=command,
        impl_source=FileEditSource.OH_ACI,
        security_risk=_risk(arguments),
        **{name: arguments[name] for name in EDITOR_ARGUMENTS & set(arguments)},
    )


def _offered(offer: ToolOffer, arguments: Mapping[str, Any]) -> Action:
    # Whether the arguments fit its schema the tool itself says, in words that its author has chosen.
    action_class = MCPAction if offer.runner == "mcp" else ToolCallAction
    return action_class(
        name=offer.name,
        arguments=dict(arguments),
        tool=offer.key,
        fingerprint=offer.fingerprint,
        pool=offer.pool,
    )


def _cell(arguments: Mapping[str, Any]) -> Action:
    code = required_text(arguments, "code", "execute_ipython_cell")
    return IPythonRunCellAction(code=code, security_risk=_risk(arguments))


def _browse(arguments: Mapping[str, Any]) -> Action:
    code = required_text(arguments, "code", "browser")
    return BrowseInteractiveAction(browser_actions=code, security_risk=_risk(arguments))


def _think(arguments: Mapping[str, Any]) -> Action:
    return AgentThinkAction(thought=required_text(arguments, "thought", "think"))


def _delegate(arguments: Mapping[str, Any]) -> Action:
    return AgentDelegateAction(
        agent=required_text(arguments, "agent", "delegate"),
        inputs={"task": required_text(arguments, "task", "delegate")},
        background=arguments.get("background", False),
        join=arguments.get("join", "all"),
    )


def _delegate_browsing(arguments: Mapping[str, Any]) -> Action:
    task = required_text(arguments, "task", "delegate_to_browsing_agent")
    return AgentDelegateAction(agent="BrowsingAgent", inputs={**arguments, "task": task})


def _finish(arguments: Mapping[str, Any]) -> Action:
    return AgentFinishAction(final_thought=required_text(arguments, "message", "finish"))


def _finish_with_output(arguments: Mapping[str, Any]) -> Action:
    output = arguments.get("output", {})  # whether it may be empty its schema says
    if isinstance(output, str):  # many models write an object as its text
        try:
            output = json.loads(output, parse_constant=_refuse_constant, parse_int=_integer)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"The output of finish must be a JSON object: {error}.") from error
    if not isinstance(output, dict):
        raise ToolCallError(f"The output of finish must be a JSON object, not {type(output).__name__}.")
    message = arguments.get("message")
    return AgentFinishAction(final_thought=message if isinstance(message, str) else "", outputs=output)


def _plan(arguments: Mapping[str, Any]) -> Action:
    return PlanAction(plan=required_text(arguments, "plan", "propose_plan"))


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], Action]] = {
    "execute_bash": _run,
    "str_replace_editor": _edit,
    "execute_ipython_cell": _cell,
    "browser": _browse,
    "think": _think,
    "finish": _finish,
    "delegate": _delegate,
    "delegate_to_browsing_agent": _delegate_browsing,
    "propose_plan": _plan,
    "request_condensation": lambda _: CondensationRequestAction(),
    "task_tracker": task_tracking_action,
    "note": note_action,
    "grep": grep_action,
    "glob": glob_action,
    "view": view_action,
    **{
        tool.name: partial(code_search_action, tool)
        for tool in (SEARCH_CODE_SNIPPETS, GET_ENTITY_CONTENTS, EXPLORE_TREE_STRUCTURE)
    },
}


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError as error:
        raise ToolCallError(f"Invalid float passed to 'timeout' argument: {value[:100]!r}.") from error
    if not 0 < seconds < float("inf"):
        raise ToolCallError("'timeout' must be a positive number of seconds.")
    return seconds


def _risk(arguments: Mapping[str, Any]) -> ActionSecurityRisk:
    """Return the model's own estimate; what is missing or invalid is unknown (OpenHands 9.1)."""
    risk = arguments.get("security_risk")
    named = ActionSecurityRisk.__members__.get(risk) if isinstance(risk, str) else None
    return ActionSecurityRisk.UNKNOWN if named is None else named


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:  # more than the log's integers can hold
        raise ValueError(f"the integer {digits[:20]}… is too large")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
