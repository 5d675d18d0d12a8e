"""The summary of a conversation: a small object, folded from its log.

Holds: the same events give the same summary, whether it is read from a live store or from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any, Self

from broker.contract import (
    ERROR_KEYS,
    AgentFinishAction,
    AgentRejectAction,
    AgentSpec,
    AgentState,
    AgentStateChangedObservation,
    ConversationChanged,
    ConversationCreated,
    ConversationStarted,
    DelegateEnded,
    Event,
    EventSource,
    MessageAction,
    ModelCallFailed,
    ModelReply,
    Observation,
    SystemMessageAction,
    find_error_remedy,
    render_error,
)
from broker.log import EXPIRED_CODE, Status
from deckhands.client.reading.metrics import Metrics, MetricsFold

LIMIT_ERRORS = (
    "RuntimeError: Agent reached maximum iteration.",
    "RuntimeError: Agent reached maximum budget for conversation.",
    "RuntimeError: Agent reached maximum number of tokens for conversation.",
    "RuntimeError: Agent reached maximum time for conversation.",
)
"""The first words of the error in a conversation that reached a limit (OpenHands section 4.3 and 4.4)."""

_STATE_PREDICATES: Mapping[str, str] = {
    AgentState.ERROR: "has failed",
    AgentState.AWAITING_USER_INPUT: "waits for a message",
    AgentState.AWAITING_USER_CONFIRMATION: "waits for a confirmation",
    AgentState.USER_CONFIRMED: "runs a confirmed action",
    AgentState.USER_REJECTED: "was refused an action",
}
"""The rest of the sentence `The conversation …`, for the states whose names are no adjectives."""

_ADDED_FIELDS = (
    "not_before",
    "expires",
    "metrics",
    "outputs",
    "asked_id",
    "sandbox",
    "has_ipython",
    "delegates",
    "labels",
)
"""Fields missing in summaries of earlier versions."""


TIMES = ("started", "updated", "not_before", "expires")


class ExitCode(IntEnum):
    """The exit codes of the CLI's commands."""

    FINISHED = 0
    ERROR = 1
    USAGE = 2
    REJECTED = 3
    OUT_OF_TIME = 4
    NEEDS_PERSON = 5
    LIMIT = 6
    EXPIRED = 7
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Summary:
    """A conversation in numbers and a few texts.

    Attributes:
        state: the agent's state, see `AgentState`.
        iterations: steps of the model with a reply.
        cost_usd: includes finished delegates, like the tokens; a lower bound if `has_unknown_cost`.
        estimated_calls: calls without usage from the provider, whose tokens and costs are estimated.
        duration_seconds: from the first event to the last; for a fork, without the events copied from its origin.
        last_error: the error it ended with, or the last failed model call without a later success; or empty. An error
            key of OpenHands' GUI is replaced by a sentence with the provider's text.
        error_code: the class of that error or failed call, or empty.
        error_detail: the provider's text about it, or empty.
        message: the agent's last message: its final thought, its reason to refuse, its question.
        outputs: the structured output of its finish; empty while no finish counts.
        asked_id: the action that awaits confirmation; None for none.
        sandbox: the requested sandbox, possibly `auto`; `none` also if an action ran without one; empty if unknown.
        has_ipython: the agent can run cells.
        delegates: the agents to which it can delegate, by name: each agent and its model, if specified.
        metrics: cost, tokens and latency of every call, and the usage of each delegate.
        labels: the labels that its producer has set.
        not_before: the earliest time at which it may start; None: it has started, or may at once.
        expires: the latest time at which it may start; None: it has started, or there is no limit.
    """

    conversation_id: str
    state: str
    iterations: int
    cost_usd: float
    prompt_tokens: int
    completion_tokens: int
    duration_seconds: float
    last_event_id: int
    has_unknown_cost: bool
    title: str
    agent: str
    model: str
    workspace: str | None
    started: datetime | None
    updated: datetime | None
    last_error: str
    error_code: str
    error_detail: str
    message: str
    metrics: Metrics = field(default_factory=Metrics)
    outputs: dict[str, Any] = field(default_factory=dict)
    asked_id: int | None = None
    sandbox: str = ""
    estimated_calls: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    has_ipython: bool = False
    delegates: dict[str, str] = field(default_factory=dict)
    not_before: datetime | None = None
    expires: datetime | None = None

    @property
    def remedy(self) -> str:
        """A suggestion for the last failed model call, or empty."""
        return find_error_remedy("", self.error_code)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; `summary` is true in this object and in no event."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in TIMES:
            moment = fields[name]
            fields[name] = moment.isoformat() if moment else None
        parts = {
            "per_model": self.metrics.per_model(),
            "per_delegate": [asdict(delegate) for delegate in self.metrics.delegates],
        }
        return {"summary": True} | fields | {"remedy": self.remedy, "metrics": self.metrics.get() | parts}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return a summary from the fields that `as_json` returned.

        Raises:
            KeyError, TypeError, ValueError: they are not the fields of a summary.
        """
        known: dict[str, Any] = {name: fields[name] for name in cls.__slots__ if name not in _ADDED_FIELDS}
        if "metrics" in fields:
            known["metrics"] = Metrics.from_json(fields["metrics"])
        known["outputs"] = fields.get("outputs", {})
        known["asked_id"] = fields.get("asked_id")
        known["sandbox"] = fields.get("sandbox", "")
        known["labels"] = fields.get("labels", {})
        known["has_ipython"] = fields.get("has_ipython", False)
        known["delegates"] = dict(fields.get("delegates", {}))
        for name in TIMES:
            known[name] = datetime.fromisoformat(fields[name]) if fields.get(name) else None
        return cls(**known)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that ran this conversation until it settled."""
        match self.state:
            case AgentState.FINISHED:
                return ExitCode.FINISHED
            case AgentState.REJECTED:
                return ExitCode.REJECTED
            case AgentState.STOPPED:
                return ExitCode.INTERRUPTED
            case AgentState.ERROR if self.error_code == EXPIRED_CODE:
                return ExitCode.EXPIRED
            case AgentState.ERROR:
                return ExitCode.LIMIT if self.last_error.startswith(LIMIT_ERRORS) else ExitCode.ERROR
        return ExitCode.NEEDS_PERSON


def find_quoted_texts(events: Sequence[Event]) -> list[int]:
    """Return the places of the texts that a summary quotes: the agent's last message, and its last finish."""
    places: dict[bool, int] = {}
    for place, event in enumerate(events):
        is_finish = isinstance(event, AgentFinishAction)
        is_said = isinstance(event, MessageAction) and event.source == EventSource.AGENT
        if is_finish or is_said or isinstance(event, AgentRejectAction):
            places[is_finish] = place
    return sorted(places.values())


class Tally:
    """A summary of a growing log."""

    def __init__(self) -> None:
        self.status = Status()
        self._created: ConversationCreated | None = None
        self._last: Event | None = None
        self._started: datetime | None = None
        self._updated: datetime | None = None
        self._replies = 0
        self._metrics = MetricsFold()
        self._has_unknown_cost = False
        self._estimated_calls = 0
        self._model = ""
        self._last_error = ""
        self._error_code = ""
        self._failure: ModelCallFailed | None = None
        self._message = ""
        self._outputs: dict[str, Any] = {}
        self._sandbox = ""
        self._is_waiting = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Return the tally of a log, or of its first events."""
        tally = cls()
        for event in events:
            tally.add(event)
        return tally

    @property
    def last_event_id(self) -> int:
        """The id of the last event added; 0 before the first."""
        return self._last.id if self._last else 0

    def add(self, event: Event) -> None:
        """Add the next event."""
        was = self.status.state
        self._metrics.add(event)
        self.status = self.status.apply(event)
        self._last = event
        self._started = self._started or event.timestamp
        if event.timestamp is not None and self._started is not None:
            # events copied from a fork's origin are older than the fork
            self._updated = max(event.timestamp, self._started)
        match event:
            case ConversationCreated():
                self._created = event
                self._is_waiting = event.has_start_window
                self._sandbox = event.workspace.sandbox
                self._model = event.agent.llm.model or ""
            case ConversationChanged():
                self._apply_change(event)
            case ConversationStarted() | SystemMessageAction():
                self._is_waiting = False
            case ModelReply():
                self._add_reply(event)
            case DelegateEnded():
                self._has_unknown_cost = self._has_unknown_cost or event.has_unknown_cost
            case ModelCallFailed():
                self._last_error = render_error(event.last_error or event.content, event.content)
                self._error_code = event.code
                self._failure = event
            case AgentFinishAction():
                self._message = event.final_thought or event.thought
                self._outputs = dict(event.outputs)
            case AgentRejectAction():
                self._message = str(event.outputs.get("reason", "")) or event.thought
            case MessageAction(source=EventSource.AGENT):
                self._message = event.content
            case AgentStateChangedObservation(agent_state=AgentState.ERROR):
                detail = self._failure.content if self._failure else ""
                self._last_error = render_error(event.reason, detail) or self._last_error
                self._error_code = event.code or self._error_code or ERROR_KEYS.get(event.reason, ("", ""))[1]
            case AgentStateChangedObservation(agent_state=AgentState.RUNNING) if was is AgentState.ERROR:
                self._forget_error()
            case Observation(unsandboxed=True):
                self._sandbox = "none"

    def summary(self) -> Summary:
        """Return the summary of the events so far, which must include the first event."""
        created = self._created
        assert created is not None, "a log starts with its ConversationCreated"
        metrics = self._metrics.metrics()
        seconds = (self._updated - self._started).total_seconds() if self._started and self._updated else 0.0
        return Summary(
            conversation_id=created.conversation_id,
            state=self.status.state.value,
            iterations=self._replies,
            cost_usd=round(metrics.accumulated_cost, 8),
            prompt_tokens=metrics.accumulated_token_usage.prompt_tokens,
            completion_tokens=metrics.accumulated_token_usage.completion_tokens,
            duration_seconds=round(seconds, 3),
            last_event_id=self.last_event_id,
            has_unknown_cost=self._has_unknown_cost,
            title=created.title,
            agent=created.agent.name,
            model=self._model,
            workspace=created.workspace.path,
            started=self._started,
            updated=self._updated,
            last_error=self._last_error,
            error_code=self._error_code,
            error_detail=self._failure.content if self._failure else "",
            message=self._message,
            metrics=metrics,
            outputs=self._outputs if self.status.state is AgentState.FINISHED else {},
            asked_id=self.status.confirmation_id,
            sandbox=self._sandbox,
            estimated_calls=self._estimated_calls,
            labels=dict(created.labels or {}),
            has_ipython=created.agent.enable_jupyter,
            not_before=created.not_before if self._is_waiting else None,
            expires=created.expires if self._is_waiting else None,
            delegates={name: _describe_agent(delegate) for name, delegate in created.agent.delegates.items()},
        )

    def _apply_change(self, change: ConversationChanged) -> None:
        """Apply a user's change to the properties of the conversation."""
        changes: dict[str, Any] = {"labels": change.labels} if change.labels is not None else {}
        if change.title is not None:
            changes["title"] = change.title
        if change.agent is not None:
            changes["agent"] = change.agent
            self._model = change.agent.llm.model or self._model
        if changes and self._created is not None:
            self._created = self._created.model_copy(update=changes)

    def _forget_error(self) -> None:
        self._last_error = self._error_code = ""
        self._failure = None

    def _add_reply(self, reply: ModelReply) -> None:
        self._forget_error()
        if reply.service == "agent":
            self._replies += 1
            self._model = reply.model or self._model
        self._has_unknown_cost = self._has_unknown_cost or reply.cost_usd is None
        self._estimated_calls += bool(reply.is_usage_estimated)


def _describe_agent(agent: AgentSpec) -> str:
    return f"{agent.name}, {agent.llm.model}" if agent.llm.model else agent.name


def summarize(events: Iterable[Event]) -> Summary:
    """Return the summary of a log."""
    return Tally.of(events).summary()


def render_state(state: str) -> str:
    """Return the rest of the sentence `The conversation …` for a state."""
    return _STATE_PREDICATES.get(state) or f"is {state.replace('_', ' ')}"
