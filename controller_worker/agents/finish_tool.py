"""The agent's tool for finishing, and the structured output that it returns.

Does not: judge the output; see `controller_worker.core.concerns.acceptance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.contract import (
    AgentFinishAction,
    Event,
    ModelReply,
    OutputSpec,
    TaskItem,
    ToolCallError,
    ToolSpec,
    parse_json,
    parse_message,
)
from broker.tools import find_violations
from controller_worker.agents.agent import Agent
from controller_worker.providers import remove_forced_nulls

ARGUMENT = "output"
_SHARED = ("$defs", "definitions")


def make_finish_tool(output: OutputSpec | None) -> ToolSpec:
    """Return the tool for finishing, with the required output as a parameter."""
    tool = AgentFinishAction.tool_spec
    if output is None:
        return tool
    parameters = tool.parameters
    schema = output.json_schema
    shared = {name: _move_references(schema[name]) for name in _SHARED if name in schema}
    own = {name: _move_references(part) for name, part in schema.items() if name not in (*_SHARED, "$schema", "$id")}
    return replace(
        tool,
        description=f"{tool.description} The task asks for an output of a certain form: hand it in as `{ARGUMENT}`.",
        parameters={
            **parameters,
            "properties": {**parameters["properties"], ARGUMENT: own},
            "required": [*parameters["required"], ARGUMENT],
            **shared,
        },
        convert=_make_finish,
    )


def to_turn_events(
    agent: Agent, reply: ModelReply, task_list: Sequence[TaskItem], output: OutputSpec | None
) -> list[Event]:
    """Return the events of a reply; see `Agent.events_of`. A reply that consists of the output is a finish."""
    finish = parse_finish(reply, output) if output is not None and reply.is_output else None
    return agent.events_of(reply, task_list) if finish is None else [finish]


def parse_finish(reply: ModelReply, output: OutputSpec) -> AgentFinishAction | None:
    """Return the finish that a text reply stands for, if the text is a valid output; otherwise None."""
    if reply.tool_calls:
        return None
    try:
        found = parse_json(reply.content)
    except (ValueError, RecursionError):
        return None
    outputs = remove_forced_nulls(found, output.json_schema)
    if not isinstance(outputs, dict) or find_violations(outputs, output.json_schema):
        return None
    return AgentFinishAction(outputs=outputs)


def _make_finish(arguments: Mapping[str, Any]) -> AgentFinishAction:
    output = arguments.get(ARGUMENT, {})  # its schema decides whether it may be empty
    if isinstance(output, str):  # many models write an object as its text
        try:
            output = parse_json(output)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"The output of finish must be a JSON object: {error}.") from error
    if not isinstance(output, dict):
        raise ToolCallError(f"The output of finish must be a JSON object, not {type(output).__name__}.")
    return AgentFinishAction(final_thought=parse_message(arguments, "message", "finish"), outputs=output)


def _move_references(schema: Any) -> Any:
    """Return a part of the schema, adapted to the tool's schema: its references point at the root of that schema."""
    if isinstance(schema, Mapping):
        return {
            name: _move_reference(part) if name == "$ref" and isinstance(part, str) else _move_references(part)
            for name, part in schema.items()
        }
    return [_move_references(part) for part in schema] if isinstance(schema, list | tuple) else schema


def _move_reference(ref: str) -> str:
    is_moved = ref.startswith("#") and not ref.startswith(tuple(f"#/{name}/" for name in _SHARED))
    return f"#/properties/{ARGUMENT}{ref[1:]}" if is_moved else ref
