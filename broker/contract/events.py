"""Events: what the log holds. One frozen Pydantic model per kind, told apart by a stable `kind`.

Holds: an event never changes once appended; its wire form (`Event.wire`) is plain JSON, the same in the log, in an
export and on a stream; kinds are never reused with another meaning.
Does not: store prompts. A model's reply is stored once, as `ModelReply`; the actions it led to name it by event id.
Names, fields and defaults follow OpenHands V0 (section 3); the kinds `conversation.*` and `model.*` are ours.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from pydantic import Field

from broker.contract.agent_state import AgentState
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
    with_id,
)
from broker.contract.plain_json import JsonObject, replace_surrogates
from broker.contract.specs import AgentSpec, Limits, LLMSpec, Part, Tenancy, WorkspaceSpec
from broker.contract.timing import DoubleTexting

__all__ = [
    "Action",
    "ActionSecurityRisk",
    "AgentSpec",
    "BlobRef",
    "ConfirmationStatus",
    "ConversationBegun",
    "ConversationCreated",
    "DelegateEnded",
    "Event",
    "EventSource",
    "EventT",
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
    "Part",
    "Tenancy",
    "TokenUsage",
    "ToolCallMetadata",
    "WorkspaceSpec",
    "WorkspaceUse",
    "replace_surrogates",
    "with_id",
]


class ModelToolCall(Part):
    """A tool call as the model wrote it.

    Attributes:
        arguments: the raw text, JSON if the model behaved.
        problem: why it cannot be carried out, in words for the model; None where reading it found nothing.
    """

    id: str
    name: str
    arguments: str
    problem: str | None = None


class TokenUsage(Part):
    """Tokens of one model call, as the provider counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class CallEstimate(Part):
    """What was expected of a call before it was made, which corrects the expectations of later ones.

    Attributes:
        model: that has answered, as the settings of the workers name it.
        prompt_tokens: of the prompt, estimated from its characters.
    """

    model: str
    prompt_tokens: int


class Parent(Part):
    """Whose delegate a conversation is: the conversation and the action that asked for it; `level` 1 for the first."""

    conversation_id: str
    delegate_id: int
    level: int = 1


class ConversationCreated(Event):
    """The first event of every conversation: what it is, as data.

    Attributes:
        labels: what a producer has written on it; None: nothing.
        not_before: when it may begin, as its producer asked for it; None: at once. The store counts how long.
        expires: by when it has to have begun; None: whenever it can.
        double_texting: what a message does that comes while the agent works; None: it waits for the next step.
        headless: whether nobody can be asked.
        title: for listings.
        forked_from: `ID@EVENT` of the conversation that it was forked from; None for no fork.
        tenancy: who it is for; None: for nobody in particular.
        parent: whose delegate it is; None: nobody's.
        traceparent: the span that has submitted it; None: nobody traces, or it is no context.
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
    traceparent: Traceparent = None

    @property
    def is_planned(self) -> bool:
        """Whether it has to wait, or may have to give up, before it begins."""
        return self.not_before is not None or self.expires is not None

    @property
    def forked_at(self) -> int:
        """Up to which event the conversation was taken over from another one; 0 for none."""
        _, _, at = (self.forked_from or "").rpartition("@")
        return int(at) if at.isdigit() else 0

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Conversation {self.conversation_id} ({self.agent.name})"


class ConversationBegun(Event):
    """The time has come at which a conversation was to begin."""

    kind: Literal["conversation.begun"] = "conversation.begun"
    sentence_template: ClassVar[str] = "The time to begin has come"


class OperatorActed(Event):
    """Somebody does something to the conversation through the server; what follows in the same append is the action.

    Attributes:
        author: who: the id and the name of an API key, or `anonymous`.
        action: what: `pause`, `cancel`, `close`, …
        reason: why, in the words of the author; empty for what needs none.
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
        """One line for a person."""
        return super().sentence + (f" ({self.reason})" if self.reason else "")


class ModelUsage(Part):
    """What calls of one model have used up; `cost_usd` is a lower bound where a price is not known."""

    model: str
    calls: int = 0
    cost_usd: float = 0.0
    usage: TokenUsage = TokenUsage()


class DelegateEnded(Event):
    """A delegate reports to its parent's log that it has ended, how, and what it has used up.

    Attributes:
        delegate_id: the action that asked for it.
        content: its result, in words for the parent's model.
        models: the same by model; what it has used up includes what its own delegates have.
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


class ModelReply(Event):
    """What a model answered, whole and once. Its tool calls lead to actions that name this event's id.

    Attributes:
        cost_usd: None when the price of the model is unknown.
        latency_seconds: from request to the end of the reply.
        iteration: which step of the conversation this reply ends, from 1.
        seen_id: the last event the prompt was made from.
        service: who asked: `agent` for a step; `condenser` for a condensation and `critic` for a verdict on a finish,
            which are no steps.
        estimate: None where no budget and no quota wanted one.
        is_output: the words are the output of the conversation, to whose schema the model was held; None: they are not.
        is_usage_estimated: the provider has counted nothing, or what cannot be, so that usage and cost are estimated;
            None: they are the provider's.
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

    @property
    def sentence(self) -> str:
        """One line for a person."""
        calls = ", ".join(call.name for call in self.tool_calls)
        return f"{self.model} replied" + (f" and calls {calls}" if calls else "")


class ModelSwitched(Event):
    """The conversation continues with another model.

    Attributes:
        model: replaces `AgentSpec.llm.model`.
        by: who says so, in their own words; it proves nothing.
    """

    kind: Literal["model.switched"] = "model.switched"
    is_shown_to_people: ClassVar[bool] = True
    model: str
    reason: str = ""
    by: str | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"The model is now {self.model}" + (f" ({self.reason})" if self.reason else "")


class ModelCallFailed(Event):
    """A model call that brought no reply.

    Attributes:
        code: the error's class, see `controller_worker.providers.errors`.
        content: the provider's text.
        last_error: the error as OpenHands shows it.
        attempt: how many calls of this step have failed, this one included.
        attempts: how many there may be in all; None: an earlier version has not said so.
        retry_at: when the step is tried again, aware UTC; None when it is not.
    """

    kind: Literal["model.failed"] = "model.failed"
    is_shown_to_people: ClassVar[bool] = True
    code: str
    content: str = ""
    last_error: str = ""
    attempt: int = 1
    attempts: int | None = None
    retry_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        again = f"; attempt {self.attempt + 1} follows" if self.retry_at else ""
        return f"The model call failed ({self.code}): {self.content[:300]}{again}"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence + self._when, "red", "! "),)

    @property
    def _when(self) -> str:
        """When the next attempt is made, and how long that is after this one."""
        if self.retry_at is None:
            return ""
        wait = f" in {(self.retry_at - self.timestamp).total_seconds():.0f} s," if self.timestamp else ""
        return f"{wait} at {self.retry_at:%H:%M:%S} UTC"


class ModelCallDeferred(Event):
    """A model call that has to wait before it may be made; the conversation is woken when it may.

    Attributes:
        code: `rate_limit` for a quota, `waiting_for_budget` for a budget, `batch` for a call that was given to a batch.
        content: the resource that is short.
        waits_for: the models of the quota, as its table has them, or the account of the budget; None: neither, or an
            earlier version has not said so.
        expected_at: about when it will be, aware UTC; None when nobody can say.
    """

    kind: Literal["model.deferred"] = "model.deferred"
    code: str
    content: str = ""
    waits_for: str | None = None
    expected_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        expected = f"; expected at {self.expected_at:%H:%M:%S} UTC" if self.expected_at else ""
        return f"The model call waits ({self.code}): {self.content}{expected}"


class ModelCallAdmitted(Event):
    """The wait before a model call is over."""

    kind: Literal["model.admitted"] = "model.admitted"
    sentence_template: ClassVar[str] = "The model call may be made"
