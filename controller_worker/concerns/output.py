"""The output of an agent's finish, checked against the schema that the agent was given.

Holds: a function of the events of a turn, whatever the agent; what does not fit is refused in the same append, so
that it never counts and a replay needs nothing else.
Differs: the original's finish has words only.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract.actions import AgentFinishAction
from broker.contract.events import Event
from broker.contract.observations import FinishRefusedObservation
from broker.specs.agent_state import AgentState
from broker.specs.specs import OutputSpec
from broker.tools.output_schema import problems_of
from controller_worker.core.announcement import announce
from controller_worker.core.effects import Effect

if TYPE_CHECKING:
    from controller_worker.core.state import State

NOT_VALID = "OutputNotValidError: The output of the finish did not fit its schema"
NOT_VALID_CODE = "output_not_valid"
REFUSED = (
    "Your finish was not accepted: its `output` does not fit the schema.\n{problems}\n"
    "Correct it, and call finish again with the whole output."
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


def give_up(state: State, now: datetime) -> Effect | None:
    """End the work when there have been too many corrections."""
    output = state.setup.agent.output
    if output is None or state.acceptance.corrections <= output.max_corrections:
        return None
    return announce(state, AgentState.ERROR, NOT_VALID, code=NOT_VALID_CODE)
