"""State: what a controller knows of a conversation. A fold of its log, without the history.

Holds: plain values only, so that a snapshot is the state and nothing else; never changed in place.
Does not: hold what the model sees; that is read from the log (`memory`).
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from broker.actions import TaskItem
from broker.agent_state import AgentState
from broker.events import AgentSpec, Limits, Parent, Tenancy, ToolCallMetadata, WorkspaceSpec
from controller_worker.stuck_detector import Loop, RecentEvents, Trace

SNAPSHOT_VERSION = 20


@dataclass(frozen=True, slots=True)
class PendingAction:
    """An action in the log that has no observation yet."""

    id: int
    tool_call_metadata: ToolCallMetadata | None = None
    trace: Trace | None = None
    is_awaiting: bool = False


@dataclass(frozen=True, slots=True)
class DelegateEnd:
    """What a delegate has brought back, until it is told."""

    conversation_id: str
    content: str
    outputs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delegate:
    """A conversation that this one has begun for a part of its work, until its end is told.

    Attributes:
        id: the action that asks for it.
        turn_id: the reply that holds that action.
        is_any: the step waits for any of the turn's delegates only.
        is_answered: the action has its observation; no step waits for it.
        refusal: why it is not started, or empty.
        iterations, budget_usd, tokens: what it may use up.
    """

    id: int
    agent: str
    tool_call_metadata: ToolCallMetadata | None
    turn_id: int
    is_background: bool = False
    is_any: bool = False
    is_answered: bool = False
    refusal: str = ""
    iterations: int = 0
    budget_usd: float | None = None
    tokens: int | None = None
    end: DelegateEnd | None = None

    def but(self, **changes: Any) -> Delegate:
        """Return the delegate with other values in some of its fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Order:
    """What the delegates are to be told, and the event of the parent's log because of which."""

    state: AgentState
    id: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Why and until when the conversation waits before it tries again."""

    reason: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Gate:
    """What a model call waits for, quota or budget, and about until when; None when nobody can say."""

    reason: str
    expected_at: datetime | None


@dataclass(frozen=True, slots=True)
class UnansweredMessage:
    """A person's message that has not led to a recall yet."""

    id: int
    content: str
    sent: datetime | None
    is_first: bool


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How it stands with the finishes of the agent, since a person spoke.

    Attributes:
        check_id: the action that checks the finish, while it runs; 0 for none.
        refusals: how many finishes were refused.
        is_refused: the latest was refused and the agent has not been told.
        is_checked: the check has accepted the latest, and the critic is asked.
        is_accepted: the latest counts.
        is_by_critic: it was the critic that refused the latest.
        corrections: how often what was handed in did not fit its schema.
    """

    check_id: int = 0
    refusals: int = 0
    is_refused: bool = False
    is_checked: bool = False
    is_accepted: bool = False
    is_by_critic: bool = False
    corrections: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """Whether the workspace was asked what it tells agents.

    Attributes:
        action_id: the question under way.
        attempts: how often it was asked.
        answer_id: the event that answers it, 0 for none.
    """

    action_id: int = 0
    attempts: int = 0
    answer_id: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan under discussion, 0 for none, and whether a person has changed it."""

    action_id: int = 0
    text: str = ""
    is_edited: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """How it stands with a workspace that is to begin with something.

    Attributes:
        action_id: the opening under way, 0 for none.
        attempts: how often it was begun since a person went on.
    """

    action_id: int = 0
    attempts: int = 0
    is_open: bool = False
    has_failed: bool = False


@dataclass(frozen=True)
class State:
    """A conversation as its log tells it (OpenHands section 4.1, less the history).

    Attributes:
        version: id of the last event folded in; 0 for an empty log.
        requested: a state a person asked for and the controller has not announced yet.
        ending: how the agent ends its turn (finished, rejected, a question, an error), not announced yet.
        pending: actions without observation, in the order of the log.
        message: a person's latest message, to be recalled.
        last_message_id: the latest message of a person.
        is_reply_outdated: a person spoke after the latest reply's prompt was made, so that reply may not end anything.
        error_code: the class of the last error, or empty.
        iteration: model replies so far.
        task_list: the agent's, as it planned it last.
        deadline: when work ends for want of time.
        gate: what the next model call waits for, told by the log.
        attempt: failed calls of the step under way.
        overflows: how many prompts in a row did not fit the model.
        wants_condensation: the latest of them has not led to a request yet.
        opening: how it stands with what the workspace is to begin with.
        survey: what is known of the workspace's skills.
        has_unknown_cost: some reply had no known price; `cost_usd` is then a lower bound.
        reply_id: the latest model reply.
        recent: what stuck detection knows of the latest events.
        loop: the latest loop, until a person speaks or it is recovered from.
        loops_met: how many loops the policy has answered since a person spoke.
        acceptance: how it stands with the check of a finish.
        note_taking: notes to be written, forgotten or listed.
        recovery: the way out of the loop that a person chose, 0 for none.
        asked_id: the action that a person is asked to confirm.
        answer_id: the event in which a person answered.
        confirmed_id: the copy that runs because it was confirmed.
        parent: whose delegate it is; at `delegate_level` 0 nobody's.
        delegates: those whose end is not told yet.
        delegated_iterations: steps of delegates that have ended.
        delegated_usd: what they cost, which is part of `cost_usd`.
        order: what the delegates are to be told.
        plan: what a planning agent has proposed, until that is settled.
        result_id: the action that ended the latest turn.
    """

    version: int = 0
    conversation_id: str = ""
    agent: AgentSpec = AgentSpec()
    workspace: WorkspaceSpec = WorkspaceSpec()
    limits: Limits = Limits()
    tenancy: Tenancy = Tenancy()
    headless: bool = True
    agent_state: AgentState = AgentState.LOADING
    requested: AgentState | None = None
    ending: AgentState | None = None
    last_error: str = ""
    error_code: str = ""
    has_system_message: bool = False
    message: UnansweredMessage | None = None
    last_message_id: int = 0
    is_reply_outdated: bool = False
    pending: tuple[PendingAction, ...] = ()
    wait: Wait | None = None
    gate: Gate | None = None
    attempt: int = 0
    overflows: int = 0
    wants_condensation: bool = False
    opening: Opening = Opening()
    survey: Survey = Survey()
    iteration: int = 0
    max_iterations: int = 0
    max_budget_usd: float | None = None
    max_tokens: int | None = None
    deadline: datetime | None = None
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    task_list: tuple[TaskItem, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reply_id: int = 0
    recent: RecentEvents = field(default_factory=RecentEvents)
    loop: Loop | None = None
    loops_met: int = 0
    recovery: int = 0
    asked_id: int | None = None
    answer_id: int = 0
    confirmed_id: int = 0
    parent: Parent | None = None
    delegate_level: int = 0
    delegates: tuple[Delegate, ...] = ()
    delegated_iterations: int = 0
    delegated_usd: float = 0.0
    forked_at: int = 0
    inherited_usd: float = 0.0
    order: Order | None = None
    result_id: int = 0
    plan: Plan = Plan()
    acceptance: Acceptance = Acceptance()
    note_taking: tuple[PendingAction, ...] = ()


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414  (for others to import)
else:

    def replace(state: State, **changes: Any) -> State:
        """Return the state with other values in some of its fields.

        A fold does this twice for each event, and `dataclasses.replace` takes twenty times as long: it asks the class
        about every field. Names are checked where types are.
        """
        other = _new(State)
        _set(other, "__dict__", {**state.__dict__, **changes})
        return other


_new, _set = object.__new__, object.__setattr__  # a frozen instance is filled before anybody sees it
_ADAPTER = TypeAdapter(State)


def snapshot_of(state: State) -> bytes:
    """Return the bytes of a snapshot: version, CRC-32, then the state in msgpack."""
    payload: bytes = msgpack.packb(_ADAPTER.dump_python(state, mode="json"))
    return bytes((SNAPSHOT_VERSION,)) + zlib.crc32(payload).to_bytes(4, "big") + payload


def state_from(snapshot: bytes | None) -> State | None:
    """Return the state of a snapshot; None when there is none, or none this version can use.

    A snapshot only saves time: whoever gets None folds the whole log.
    """
    if not snapshot or snapshot[0] != SNAPSHOT_VERSION:
        return None
    payload = snapshot[5:]
    if zlib.crc32(payload) != int.from_bytes(snapshot[1:5], "big"):
        return None
    try:
        fields: dict[str, Any] = msgpack.unpackb(payload)
        return _ADAPTER.validate_python(fields)
    except (ValueError, ValidationError, msgpack.UnpackException):
        return None


def with_pending(state: State, action_id: int) -> State:
    """Return the state with an action of the controller's own, which no loop and no confirmation is about."""
    return replace(state, pending=(*state.pending, PendingAction(action_id)))


def without_pending(state: State, action_id: int) -> State:
    """Return the state with one action settled."""
    left = tuple(pending for pending in state.pending if pending.id != action_id)
    return state if len(left) == len(state.pending) else replace(state, pending=left)
