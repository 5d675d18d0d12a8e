"""What an agent hands in when it finishes, against the schema it was given.

Holds: a function of the events of a turn, whoever the agent is; what does not fit is refused in the same append, so
that it never counts and a replay needs nothing else.
Differs: the original's finish has words only.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.actions import AgentFinishAction
from broker.agent_state import AgentState
from broker.events import Event
from broker.observations import FinishRefusedObservation
from broker.output_schema import problems_of
from broker.specs import OutputSpec
from controller_worker.announcement import announce
from controller_worker.effects import Append
from controller_worker.state import State

NOT_VALID = "OutputNotValidError: What the agent handed in did not fit the schema of its output"
NOT_VALID_CODE = "output_not_valid"
REFUSED = (
    "Your finish was not accepted: its `output` does not fit the schema.\n{problems}\n"
    "Mend it, and call finish again with the whole output."
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
