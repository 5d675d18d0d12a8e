"""Effects: what the core can want. Deciding one does nothing; the shell (`loop.performer`) performs it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from broker.contract import AgentState, Event


@dataclass(frozen=True, slots=True)
class Append:
    """Append events.

    Attributes:
        answers: position in `events` → the runnable action that this observation settles.
        cancels: running actions whose processes are to end; 0: all processes of the conversation.
        is_partial: the append is full; what else is wanted enters in the next ones.
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
    """Append what is recalled about the latest message, with what the workspace said in the event `survey_id`."""

    survey_id: int


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Append what a person's answer (the event `answer_id`) to the question about an action leads to."""

    action_id: int
    answer_id: int


@dataclass(frozen=True, slots=True)
class TakeNote:
    """Do to the notebook what an action wants, and append the result."""

    action_id: int


@dataclass(frozen=True, slots=True)
class AwaitDelegates:
    """Make sure that these delegates exist, then wait for those that the step needs to end."""

    delegate_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwaitStart:
    """Ask the store whether the conversation may begin, and wait until then."""


@dataclass(frozen=True, slots=True)
class AwaitTools:
    """Make sure that a tool worker has these actions, then wait for their observations."""

    action_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model for the step `iteration` (from 1), or a critic about the finish before it.

    `attempt` counts the calls, from 1.
    """

    iteration: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Park:
    """Nothing to do before `until`."""

    until: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do until there is news."""


@dataclass(frozen=True, slots=True)
class StartDelegate:
    """Make sure that a delegate in the background exists: a fork inherits it from a log, and nobody has begun it."""

    delegate_id: int


@dataclass(frozen=True, slots=True)
class TellDelegates:
    """Pass a change of state, the event `order_id`, on to the delegates that were begun before it.

    Attributes:
        since: but not on to those that were asked for by an event before this one.
        takes_back: only to those that an earlier order has paused, which the log has lost.
    """

    state: AgentState
    order_id: int
    since: int = 0
    takes_back: bool = False


Errand = StartDelegate | TellDelegates
"""An effect that leaves nothing in the log: each owner performs it once. Idempotent."""

Wait = AwaitStart | AwaitDelegates | AwaitTools | Park | Rest
"""An effect that only waits."""

Effect = Append | Greet | Recall | CarryOut | TakeNote | CallModel | Wait | Errand
