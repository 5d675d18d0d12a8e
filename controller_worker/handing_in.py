"""What an agent hands in when it finishes, against the schema it was given.

Holds: a function of the events of a turn, whoever the agent is; what does not fit is refused in the same append, so
that it never counts and a replay needs nothing else.
Differs: the original's finish has words only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from broker.actions import AgentFinishAction
from broker.agent_state import AgentState
from broker.events import Event
from broker.observations import FinishRefusedObservation
from broker.output_schema import problems_of
from broker.specs import OutputSpec
from broker.tool_specs import ToolSpec
from controller_worker.announcement import announce
from controller_worker.effects import Append
from controller_worker.state import State

ARGUMENT = "output"
NOT_VALID = "OutputNotValidError: What the agent handed in did not fit the schema of its output"
NOT_VALID_CODE = "output_not_valid"
REFUSED = (
    "Your finish was not accepted: its `output` does not fit the schema.\n{problems}\n"
    "Mend it, and call finish again with the whole output."
)
_SHARED = ("$defs", "definitions")


def finish_tool(finish: ToolSpec, output: OutputSpec | None) -> ToolSpec:
    """Return the tool with which an agent finishes, with the output that it has to hand in."""
    if output is None:
        return finish
    parameters, schema = finish.parameters, output.json_schema
    shared = {name: _moved(schema[name]) for name in _SHARED if name in schema}
    own = {name: _moved(part) for name, part in schema.items() if name not in (*_SHARED, "$schema", "$id")}
    return replace(
        finish,
        description=f"{finish.description} The task asks for an output of a certain form: hand it in as `{ARGUMENT}`.",
        parameters={
            **parameters,
            "properties": {**parameters["properties"], ARGUMENT: own},
            "required": [*parameters["required"], ARGUMENT],
            **shared,
        },
    )


def examined(events: Iterable[Event], output: OutputSpec | None) -> tuple[Event, ...]:
    """Return the events of a turn; behind a finish whose output does not fit stands what refuses it."""
    if output is None:
        return tuple(events)
    found: list[Event] = []
    refusals: list[Event] = []
    for event in events:
        found.append(event)
        problems = problems_of(event.outputs, output.json_schema) if isinstance(event, AgentFinishAction) else []
        if problems:
            text = REFUSED.format(problems="\n".join(f"- {problem}" for problem in problems))
            refusals.append(FinishRefusedObservation(content=text, reason="output"))
    return (*found, *refusals)


def is_hopeless(state: State) -> bool:
    """Say whether there have been too many corrections."""
    output = state.agent.output
    return output is not None and state.acceptance.corrections > output.max_corrections


def give_up(state: State) -> Append:
    """Return what ends the conversation then."""
    return announce(state, AgentState.ERROR, NOT_VALID, code=NOT_VALID_CODE)


def _moved(schema: Any) -> Any:
    """Return a part of the schema as it reads inside the tool's: what all of it refers to stands at the root there."""
    if isinstance(schema, Mapping):
        return {
            name: _reference(part) if name == "$ref" and isinstance(part, str) else _moved(part)
            for name, part in schema.items()
        }
    return [_moved(part) for part in schema] if isinstance(schema, list | tuple) else schema


def _reference(ref: str) -> str:
    is_moved = ref.startswith("#") and not ref.startswith(tuple(f"#/{name}/" for name in _SHARED))
    return f"#/properties/{ARGUMENT}{ref[1:]}" if is_moved else ref
