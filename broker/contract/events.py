"""The events of the log. Each kind is a frozen Pydantic model with a stable `kind`.

Holds: an event never changes once appended. Its wire form (`Event.wire`) is plain JSON, identical in the log, in an
export and on a stream. A kind is never reused with another meaning.
Does not: store prompts. A model's reply is stored once, as `ModelReply`; the actions that it requested refer to it by
event id. Names, fields and defaults follow OpenHands V0 (section 3); the kinds `conversation.*` and `model.*` are ours.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from pydantic import Field

from broker.contract.agent_state import AgentState
from broker.contract.error_texts import REMEDIES, add_remedy
from broker.contract.kinds import (
    Action,
    ActionSecurityRisk,
    BlobRef,
    ConfirmationStatus,
    Event,
    EventSource,
    EventT,
    Observation,
    Paragraph,
    ToolCallMetadata,
    Traceparent,
    WorkspaceUse,
    with_fields,
    with_id,
)
from broker.contract.plain_json import JsonObject, replace_surrogates
from broker.contract.specs import AgentSpec, EventValue, Limits, LLMSpec, Tenancy, WorkspaceSpec
from broker.contract.timing import DoubleTexting
from broker.contract.token_records import RecordedTokens
from broker.contract.tool_specs import McpAddress
from broker.runtime import Acks

__all__ = [
    "Action",
    "ActionSecurityRisk",
    "AgentSpec",
    "BlobRef",
    "ConfirmationStatus",
    "ConversationCreated",
    "ConversationStarted",
    "DelegateEnded",
    "Event",
    "EventSource",
    "EventT",
    "EventValue",
    "JsonObject",
    "LLMSpec",
    "Limits",
    "ModelCallAdmitted",
    "ModelCallDeferred",
    "ModelCallFailed",
    "ModelReply",
    "ModelSwitched",
    "ModelToolCall",
    "ModelUsage",
    "Observation",
    "OperatorActed",
    "Parent",
    "PartyStopped",
    "SegmentStarted",
    "Tenancy",
    "TokenUsage",
    "ToolCallMetadata",
    "WorkspaceSpec",
    "WorkspaceUse",
    "replace_surrogates",
    "with_fields",
    "with_id",
]


class ModelToolCall(EventValue):
    """A tool call as the model wrote it.

    Attributes:
        arguments: the raw text; JSON unless the model made a mistake.
        problem: why the call cannot be parsed, as a text for the model; None if it can.
    """

    id: str
    name: str
    arguments: str
    problem: str | None = None


class TokenUsage(EventValue):
    """Tokens of one model call, as the provider counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class CallEstimate(EventValue):
    """The estimate made before a model call. It corrects the estimates of later calls.

    Attributes:
        model: the model that answered, as named in the workers' settings.
        prompt_tokens: tokens of the prompt, estimated from its characters.
    """

    model: str
    prompt_tokens: int


class Parent(EventValue):
    """The parent conversation of a delegate, and the action that started it. `level` is 1 for the first level."""

    conversation_id: str
    delegate_id: int
    level: int = 1


class ConversationCreated(Event):
    """The first event of every conversation. It holds the conversation's specification.

    Attributes:
        labels: the producer's labels; None for none.
        not_before: the earliest start that the producer requested; None to start at once. The store counts the delay.
        expires: the latest time at which the conversation may start; None for no limit.
        double_texting: the effect of a message that arrives while the agent works; None: it waits for the next step.
        acks: when one of its events counts as written, if this is stricter than the store's rule; None for the store's
            rule.
        pinned_version: the only version of controller workers that may continue it; None: any.
        rollout: the exact tokens of its replies are recorded; None: they are not.
        mcp_servers: MCP servers of this conversation alone, by their names; None for none.
        skills: sources of skills for its workspace, see `broker.contract.skill_sources`; None for none.
        headless: no user can be asked.
        title: a title for listings.
        forked_from: `ID@EVENT` of the conversation that it was forked from; None if it is no fork.
        tenancy: the tenant, experiment and priority; None if not given.
        parent: the parent of a delegate; None if it is no delegate.
        traceparent: the span that submitted it; None without tracing or if invalid.
    """

    kind: Literal["conversation.created"] = "conversation.created"
    repeated_fields: ClassVar[tuple[str, ...]] = ("agent", "workspace", "limits")
    conversation_id: str
    agent: AgentSpec = AgentSpec()
    workspace: WorkspaceSpec = WorkspaceSpec()
    limits: Limits = Limits()
    headless: bool = True
    title: str = ""
    forked_from: str | None = None
    tenancy: Tenancy | None = None
    parent: Parent | None = None
    labels: dict[str, str] | None = None
    not_before: datetime | None = None
    expires: datetime | None = None
    double_texting: DoubleTexting | None = None
    acks: Acks | None = None
    pinned_version: str | None = None
    rollout: bool | None = None
    mcp_servers: dict[str, McpAddress] | None = None
    skills: tuple[str, ...] | None = None
    traceparent: Traceparent = None

    @property
    def has_start_window(self) -> bool:
        """Whether its start is delayed or may expire."""
        return self.not_before is not None or self.expires is not None

    @property
    def forked_at(self) -> int:
        """The last event id that a fork copied from its source; 0 if it is no fork."""
        _, _, at = (self.forked_from or "").rpartition("@")
        return int(at) if at.isdigit() else 0

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Conversation {self.conversation_id} ({self.agent.name})"


class ConversationStarted(Event):
    """The scheduled start time of a conversation has been reached."""

    kind: Literal["conversation.begun"] = "conversation.begun"
    sentence_template: ClassVar[str] = "The scheduled start time has been reached"


class OperatorActed(Event):
    """A user acted on the conversation through the server. The events of the same append are the effect.

    Attributes:
        author: the id and the name of an API key, or `anonymous`.
        action: the operation: `pause`, `cancel`, `close`, …
        reason: the author's reason; empty if none is needed.
    """

    kind: Literal["conversation.operator_acted"] = "conversation.operator_acted"
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "{author}: {action}"
    source: EventSource = EventSource.USER
    author: str
    action: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return super().sentence + (f" ({self.reason})" if self.reason else "")


class ModelUsage(EventValue):
    """The usage of one model. `cost_usd` is a lower bound if a price is unknown."""

    model: str
    calls: int = 0
    cost_usd: float = 0.0
    usage: TokenUsage = TokenUsage()


class DelegateEnded(Event):
    """A delegate has ended. It reports its final state and its usage to its parent's log.

    Attributes:
        delegate_id: the action that started it.
        content: its result, as a text for the parent's model.
        models: its usage by model, including that of its delegates.
    """

    kind: Literal["conversation.delegate_ended"] = "conversation.delegate_ended"
    sentence_template: ClassVar[str] = "Delegate {conversation_id} has ended: {agent_state}"
    source: EventSource = EventSource.AGENT
    delegate_id: int
    conversation_id: str
    agent_state: AgentState
    content: str = ""
    outputs: JsonObject = Field(default_factory=dict)
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    models: tuple[ModelUsage, ...] = ()


class PartyStopped(Event):
    """A party has carried out a request to stop or to interrupt: its call or its processes have ended.

    The controller's decision is an earlier event; the end of a delegate is `conversation.delegate_ended`.

    Attributes:
        party: `model`: the call of the model; `tool`: the action, at a tool worker.
        action_id: the action; None for a call of the model.
        seconds: from the order to the end, by one clock: the store's for an action, the worker's for a call. None if
            the worker got no order and has noticed by itself that the action was answered.
    """

    kind: Literal["conversation.party_stopped"] = "conversation.party_stopped"
    counts_for_loops: ClassVar[bool] = False
    party: Literal["model", "tool"]
    action_id: int | None = None
    seconds: float | None = None

    @property
    def subject(self) -> str:
        """The party, for users."""
        return "the model call" if self.party == "model" else f"action {self.action_id}"

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Stopped: {self.subject}"


class ModelReply(Event):
    """A complete model reply. The actions that its tool calls requested refer to this event's id.

    Attributes:
        cost_usd: None if the price of the model is unknown.
        latency_seconds: from the request to the end of the reply.
        iteration: the step of the conversation that this reply completes, from 1.
        seen_id: the last event that the prompt includes.
        service: the purpose of the call: `agent` for a step. `condenser` (a condensation) and `critic` (a verdict on a
            finish) are not steps.
        estimate: None if no budget and no quota needed one.
        is_output: the content is the conversation's structured output, generated under its schema; None if it is not.
        is_usage_estimated: usage and cost are estimates, because the provider reported no usage or an invalid one; None
            if the provider reported them.
        tokens: the record of its exact tokens, which is the blob `@tokens`; None if the conversation is no rollout.
    """

    kind: Literal["model.reply"] = "model.reply"
    source: EventSource = EventSource.AGENT
    service: Literal["agent", "condenser", "critic"] = "agent"
    content: str = ""
    tool_calls: tuple[ModelToolCall, ...] = ()
    thinking_blocks: tuple[JsonObject, ...] = ()
    model: str = ""
    response_id: str = ""
    stop_reason: str = ""
    usage: TokenUsage = TokenUsage()
    cost_usd: float | None = None
    latency_seconds: float = 0.0
    iteration: int = 0
    seen_id: int = 0
    estimate: CallEstimate | None = None
    is_output: bool | None = None
    is_usage_estimated: bool | None = None
    tokens: RecordedTokens | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        calls = ", ".join(call.name for call in self.tool_calls)
        return f"{self.model} replied" + (f" and calls {calls}" if calls else "")


class SegmentStarted(Event):
    """The tokens of a rollout's reply do not continue the tokens recorded before, so they start a new segment.

    Attributes:
        reply_id: the first reply of the new segment.
        reason: `condensation`, `rollback`, `history_changed` (the messages before differ for another reason),
            `model_changed`, `template` (the chat template renders a reply otherwise when messages follow),
            `retokenized` (the server's tokens of the prompt differ) or `not_recorded` (the reply before has no tokens).
    """

    kind: Literal["model.segment_started"] = "model.segment_started"
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "The tokens of reply {reply_id} start a new segment: {reason}"
    reply_id: int
    reason: str


class ModelSwitched(Event):
    """The conversation continues with another model.

    Attributes:
        model: replaces `AgentSpec.llm.model`.
        by: the author as given by the client; not authenticated.
    """

    kind: Literal["model.switched"] = "model.switched"
    is_shown_to_users: ClassVar[bool] = True
    model: str
    reason: str = ""
    by: str | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"The model is now {self.model}" + (f" ({self.reason})" if self.reason else "")


class ModelCallFailed(Event):
    """A model call failed.

    Attributes:
        code: the class of the error, see `controller_worker.providers.errors`.
        content: the provider's text.
        last_error: the error as OpenHands shows it.
        attempt: the number of failed calls of this step, including this one.
        attempts: the maximum number of calls; None if an earlier version wrote the event.
        retry_at: when the step is retried, aware UTC; None if it is not.
    """

    kind: Literal["model.failed"] = "model.failed"
    is_shown_to_users: ClassVar[bool] = True
    code: str
    content: str = ""
    last_error: str = ""
    attempt: int = 1
    attempts: int | None = None
    retry_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        again = f"; attempt {self.attempt + 1} follows" if self.retry_at else ""
        return f"The model call failed ({self.code}): {self.content[:300]}{again}"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        remedy = REMEDIES.get(self.code, "") if self.retry_at is None else ""
        return (Paragraph(add_remedy(self.sentence + self._retry_text, remedy), "problem", "! "),)

    @property
    def _retry_text(self) -> str:
        """The time of the next attempt and its delay after this one."""
        if self.retry_at is None:
            return ""
        wait = f" in {(self.retry_at - self.timestamp).total_seconds():.0f} s," if self.timestamp else ""
        return f"{wait} at {self.retry_at:%H:%M:%S} UTC"


class ModelCallDeferred(Event):
    """A model call must wait. The conversation is woken when the call may be made.

    Attributes:
        code: `rate_limit` for a quota, `waiting_for_budget` for a budget, `batch` for a call that was submitted to a
            batch.
        content: the exhausted resource.
        waits_for: the models of the quota, as in the quota table, or the account of the budget; None if neither applies
            or an earlier version wrote the event.
        expected_at: the approximate end of the wait, aware UTC; None if unknown.
    """

    kind: Literal["model.deferred"] = "model.deferred"
    code: str
    content: str = ""
    waits_for: str | None = None
    expected_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        expected = f"; expected at {self.expected_at:%H:%M:%S} UTC" if self.expected_at else ""
        return f"The model call waits ({self.code}): {self.content}{expected}"


class ModelCallAdmitted(Event):
    """The wait before a model call is over."""

    kind: Literal["model.admitted"] = "model.admitted"
    sentence_template: ClassVar[str] = "The model call may be made"
