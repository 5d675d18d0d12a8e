"""Events: what the log holds. One frozen Pydantic model per kind, told apart by a stable `kind`.

Holds: an event never changes once appended; its wire form (`Event.wire`) is plain JSON, the same in the log, in an
export and on a stream; kinds are never reused with another meaning.
Does not: store prompts. A model's reply is stored once, as `ModelReply`; the actions it led to name it by event id.
Names, fields and defaults follow OpenHands V0 (section 3); the kinds `conversation.*` and `model.*` are ours.
"""

from __future__ import annotations

import math
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from broker.contract.agent_state import AgentState
from broker.contract.specs import AgentSpec as AgentSpec  # noqa: PLC0414  (an event holds them, so whoever has events has them)
from broker.contract.specs import Limits as Limits  # noqa: PLC0414
from broker.contract.specs import LLMSpec as LLMSpec  # noqa: PLC0414
from broker.contract.specs import Part as Part  # noqa: PLC0414
from broker.contract.specs import Tenancy as Tenancy  # noqa: PLC0414
from broker.contract.specs import WorkspaceSpec as WorkspaceSpec  # noqa: PLC0414

EventT = TypeVar("EventT", bound="Event")

MAX_JSON_DEPTH = 100


def replace_surrogates(value: Any) -> Any:
    """Copy JSON values, replacing lone surrogates by U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    return value


def plain_json(value: Any, depth: int = 0) -> Any:
    """Copy a value as the log can keep it: what is in memory is then what everybody reads later.

    Lone surrogates become U+FFFD, numbers that are none (NaN, infinities) null, integers beyond 64 bits text, tuples
    lists.

    Raises:
        ValueError: it is no JSON, or nested more than a hundred deep.
    """
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_JSON_DEPTH:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, dict):
        return {_json_name(key): plain_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, depth + 1) for item in value]
    raise ValueError(f"a {type(value).__name__} is no JSON")


def _json_name(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"a name is a {type(key).__name__}, not a text")  # noqa: TRY004  (pydantic collects ValueError)
    return str(replace_surrogates(key))


JsonObject = Annotated[dict[str, Any], AfterValidator(plain_json)]
"""An object of any shape inside an event."""


class EventSource(StrEnum):
    """Who an event comes from."""

    AGENT = "agent"
    USER = "user"
    ENVIRONMENT = "environment"


class ActionSecurityRisk(IntEnum):
    """How dangerous an action is thought to be; the integers are OpenHands' wire values."""

    UNKNOWN = -1
    LOW = 0
    MEDIUM = 1
    HIGH = 2


class ConfirmationStatus(StrEnum):
    """Whether an action may run."""

    CONFIRMED = "confirmed"
    REJECTED = "rejected"
    AWAITING_CONFIRMATION = "awaiting_confirmation"


class ToolCallMetadata(Part):
    """Which tool call of which model reply an action or observation belongs to.

    Differs: names the reply by event id instead of carrying a copy of it, because the original wrote the whole
    response into every event.
    """

    function_name: str
    tool_call_id: str
    reply_id: int
    total_calls_in_response: int = 1


class BlobRef(Part):
    """Where the whole of a shortened field is: content address and size in bytes of its UTF-8 text."""

    sha256: str
    size_bytes: int


class Event(BaseModel):
    """Anything that happened in a conversation.

    Attributes:
        id: 1, 2, 3 … within the conversation; 0 until the log has assigned it. Not part of the stored bytes.
        timestamp: when the writer made it, aware UTC; None until it is written.
        source: who it comes from.
        cause: the id of the action an observation answers.
        blobs: fields (dotted paths) that hold only head and tail here, and where the whole of each is.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    KINDS: ClassVar[dict[str, type[Event]]] = {}
    runnable: ClassVar[bool] = False

    kind: str
    id: int = Field(default=0, exclude=True)
    timestamp: datetime | None = None
    source: EventSource = EventSource.ENVIRONMENT
    cause: int | None = None
    tool_call_metadata: ToolCallMetadata | None = None
    blobs: dict[str, BlobRef] | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Enter every class with a literal kind into the table of kinds."""
        super().__pydantic_init_subclass__(**kwargs)
        kind = cls.model_fields["kind"].default
        if isinstance(kind, str):
            assert kind not in cls.KINDS or cls.KINDS[kind].__qualname__ == cls.__qualname__, kind
            Event.KINDS[kind] = cls

    def wire(self) -> dict[str, Any]:
        """Return the event as plain JSON values, without `id`; fields that are None are left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def export(self) -> dict[str, Any]:
        """Return the event as plain JSON values with `id`, `kind`, `source`, `cause_id`, `timestamp` first."""
        wire = self.wire()
        head = {
            "id": self.id,
            "kind": wire.pop("kind"),
            "source": wire.pop("source"),
            "cause_id": wire.pop("cause", None),
            "timestamp": wire.pop("timestamp", None),
        }
        return head | wire

    @property
    def pool_wanted(self) -> str:
        """The pool whose tool workers run this action; empty: those that hold the conversation's workspace."""
        return ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return self.kind


class Action(Event):
    """Something somebody wants done."""

    thought: str = ""


class Observation(Event):
    """What came of an action, or what the environment has to say; `unsandboxed` if it ran in no sandbox."""

    content: str = ""
    unsandboxed: bool | None = None


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


class Parent(Part):
    """Whose delegate a conversation is: the conversation and the action that asked for it; `level` 1 for the first."""

    conversation_id: str
    delegate_id: int
    level: int = 1


class ConversationCreated(Event):
    """The first event of every conversation: what it is, as data."""

    kind: Literal["conversation.created"] = "conversation.created"
    conversation_id: str
    agent: AgentSpec = AgentSpec()
    workspace: WorkspaceSpec = WorkspaceSpec()
    limits: Limits = Limits()
    headless: bool = True
    title: str = ""
    forked_from: str | None = None
    tenancy: Tenancy | None = None
    parent: Parent | None = None

    @property
    def forked_at(self) -> int:
        """Up to which event the conversation was taken over from another one; 0 for none."""
        _, _, at = (self.forked_from or "").rpartition("@")
        return int(at) if at.isdigit() else 0

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Conversation {self.conversation_id} ({self.agent.name})"


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

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Delegate {self.conversation_id} has ended: {self.agent_state}"


class ModelReply(Event):
    """What a model answered, whole and once. Its tool calls lead to actions that name this event's id.

    Attributes:
        cost_usd: None when the price of the model is unknown.
        latency_seconds: from request to the end of the reply.
        iteration: which step of the conversation this reply ends, from 1.
        seen_id: the last event the prompt was made from.
        service: who asked: `agent` for a step; `condenser` for a condensation and `critic` for a verdict on a finish,
            which are no steps.
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

    @property
    def sentence(self) -> str:
        """One line for a person."""
        calls = ", ".join(call.name for call in self.tool_calls)
        return f"{self.model} replied" + (f" and calls {calls}" if calls else "")


class ModelSwitched(Event):
    """The conversation goes on with another model.

    Attributes:
        model: what takes the place of `AgentSpec.llm.model`.
    """

    kind: Literal["model.switched"] = "model.switched"
    model: str
    reason: str = ""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"The model is now {self.model}" + (f" ({self.reason})" if self.reason else "")


class ModelCallFailed(Event):
    """A model call that brought no reply.

    Attributes:
        code: the error's class, see `controller_worker.llm.errors`.
        content: the provider's text.
        last_error: the error as OpenHands shows it.
        attempt: how many calls of this step have failed, this one included.
        retry_at: when the step is tried again, aware UTC; None when it is not.
    """

    kind: Literal["model.failed"] = "model.failed"
    code: str
    content: str = ""
    last_error: str = ""
    attempt: int = 1
    retry_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        again = f"; attempt {self.attempt + 1} follows" if self.retry_at else ""
        return f"The model call failed ({self.code}): {self.content[:300]}{again}"


class ModelCallDeferred(Event):
    """A model call that has to wait before it may be made; the conversation is woken when it may.

    Attributes:
        code: `rate_limit` for a quota, `waiting_for_budget` for a budget, `batch` for a call that was given to a batch.
        content: what there is not enough of.
        expected_at: about when it will be, aware UTC; None when nobody can say.
    """

    kind: Literal["model.deferred"] = "model.deferred"
    code: str
    content: str = ""
    expected_at: datetime | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        expected = f"; expected at {self.expected_at:%H:%M:%S} UTC" if self.expected_at else ""
        return f"The model call waits ({self.code}): {self.content}{expected}"


class ModelCallAdmitted(Event):
    """The wait before a model call is over."""

    kind: Literal["model.admitted"] = "model.admitted"

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return "The model call may be made"


def with_id(event: EventT, event_id: int) -> EventT:
    """Return the event under the id the log gave it."""
    return event.model_copy(update={"id": event_id})
