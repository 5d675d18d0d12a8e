"""Effects: the possible decisions of the core. Deciding one does nothing; the loop (`loop.performer`) performs it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from broker.contract import AgentState, Event


@dataclass(frozen=True, slots=True)
class Append:
    """Append events.

    Attributes:
        answers: position in `events` → the runnable action that this observation settles.
        cancels: running actions to stop; 0 stops all processes of the conversation.
        is_partial: the append is full; the next appends take the remaining events.
    """

    events: tuple[Event, ...]
    answers: tuple[tuple[int, int], ...] = ()
    cancels: tuple[int, ...] = ()
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Greet:
    """Append the agent's system message."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Append a recall, with the workspace's answer from the event `survey_id`: of the latest message, or of rules."""

    survey_id: int


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Append the events that carry out an answer to an action, the event `answer_id`.

    The event is the user's answer to a confirmation, or the question of an MCP server.
    """

    action_id: int
    answer_id: int


@dataclass(frozen=True, slots=True)
class TakeNote:
    """Apply an action to the notebook, and append the result."""

    action_id: int


@dataclass(frozen=True, slots=True)
class ManageDelegates:
    """Carry out an action that sees or controls delegates, and append the result."""

    action_id: int


@dataclass(frozen=True, slots=True)
class AwaitDelegates:
    """Ensure that these delegates exist, then wait for the ends that the step needs."""

    delegate_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwaitStart:
    """Ask the store whether the conversation may start, and wait until then."""


@dataclass(frozen=True, slots=True)
class AwaitTools:
    """Ensure that a tool worker has these actions, then wait for their observations."""

    action_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallModel:
    """Call the model for the step `iteration` (from 1), or the critic about the finish in that step.

    `attempt` counts the calls, from 1.
    """

    iteration: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Park:
    """Do nothing before `until`."""

    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing until the next event."""


@dataclass(frozen=True, slots=True)
class StartDelegate:
    """Ensure that a background delegate exists. A fork inherits the request, but the delegate was never started."""

    delegate_id: int


@dataclass(frozen=True, slots=True)
class NotifyDelegates:
    """Pass a change of state, the event `order_id`, to the delegates that were started before it.

    Attributes:
        since: leaves out delegates that an event before this one asked for.
        takes_back: applies only to delegates paused by an earlier order that the log has lost.
    """

    state: AgentState
    order_id: int
    since: int = 0
    takes_back: bool = False


SideEffect = StartDelegate | NotifyDelegates
"""An effect that leaves nothing in the log: each owner performs it once. Idempotent."""

WaitEffect = AwaitStart | AwaitDelegates | AwaitTools | Park | Rest
"""An effect that only waits."""

Effect = Append | Greet | Recall | CarryOut | TakeNote | ManageDelegates | CallModel | WaitEffect | SideEffect
