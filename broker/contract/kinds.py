"""What every kind of event is: the classes `Event`, `Action` and `Observation`.

Holds: everything that is true of all events of a kind stands on its class; defining a class registers it.
Names, fields and defaults follow OpenHands V0 (section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from broker.contract.specs import AgentSpec, Part
from broker.contract.tool_arguments import RISK, known_arguments, required_text, risk_in
from broker.contract.tool_specs import OutcomePolicy, ToolSpec
from broker.runtime import checked_traceparent

NAMES_KEPT = 1_024
"""Sets of names of fields: every kind has some."""

EventT = TypeVar("EventT", bound="Event")
Style = Literal["", "bold", "dim", "red", "green", "cyan"]


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


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text that a reader of a log sees of an event. An empty one is not shown.

    Does not: colour or shorten anything; see `deckhands.client.reading.rendering`.

    Attributes:
        mark: stands before its first line; the other lines are indented as far.
        max_lines: a longer text loses its middle where a log is shown.
    """

    text: str
    style: Style = ""
    mark: str = ""
    max_lines: int = 20


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


class WorkspaceUse(StrEnum):
    """What an observation says about the files of a workspace."""

    NONE = "none"
    READ = "read"
    CHANGED = "changed"


Traceparent = Annotated[str | None, BeforeValidator(checked_traceparent)]
"""The context of a trace. It proves nothing, and what is none counts as none."""


class Event(BaseModel):
    """Anything that happened in a conversation.

    A subclass with a literal `kind` is a kind of event. What is true of all events of a kind stands on its class.

    Attributes:
        kind: its name on the wire.
        id: 1, 2, 3 … within the conversation; 0 until the log has assigned it. Not part of the stored bytes.
        timestamp: when the writer made it, aware UTC; None until it is written.
        source: who it comes from.
        cause: the id of the action an observation answers.
        tool_call_metadata: the model's tool call that it belongs to; None: to none.
        blobs: fields (dotted paths) that hold only head and tail here, and where the whole of each is.
        KINDS: every kind, by its name on the wire.
        runnable: a tool worker carries it out.
        outcome: what to do with it when its worker died and nobody recorded its outcome.
        is_decided: only the controller writes it, unless it answers a runnable action. A replay decides it again.
        is_shown_to_model: the model sees it. False: the model sees it only within its tool call.
        is_shown_to_people: the log of a terminal shows it.
        counts_for_loops: loop detection compares it.
        workspace_use: what it says about the files of the workspace.
        sentence_template: the sentence, with the names of fields in braces.
        repeated_fields: models that are often equal in many conversations.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    KINDS: ClassVar[dict[str, type[Event]]] = {}
    repeated_fields: ClassVar[tuple[str, ...]] = ()
    runnable: ClassVar[bool] = False
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.AT_MOST_ONCE
    is_decided: ClassVar[bool] = False
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_people: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = True
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.NONE
    sentence_template: ClassVar[str] = "{kind}"

    kind: str
    id: int = Field(default=0, exclude=True)
    timestamp: datetime | None = None
    source: EventSource = EventSource.ENVIRONMENT
    cause: int | None = None
    tool_call_metadata: ToolCallMetadata | None = None
    blobs: dict[str, BlobRef] | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class with a literal kind."""
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
        return self.sentence_template.format_map(self.__dict__)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """What a reader of the log sees, if it is shown to people."""
        return (Paragraph(self.sentence, "dim"),)


class Action(Event):
    """A request for something to be done.

    Attributes:
        tool_spec: how the model asks for it, if the kind has its own tool.
        user_template: how the model reads it when a person did it; empty: by its sentence.
        argument: the tool's only argument besides the risk, and the field that it fills; None: see `from_call`.
        enabled_by: the field of `AgentSpec` with which CodeActAgent offers the tool; empty: it does not.
        traceparent: the span that led to it, see `broker.runtime.tracing`; None: nobody traces, or it is no context.
    """

    is_shown_to_model: ClassVar[bool] = True
    is_shown_to_people: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec]
    user_template: ClassVar[str] = ""
    argument: ClassVar[tuple[str, str] | None] = None
    enabled_by: ClassVar[str] = ""

    thought: str = ""
    traceparent: Traceparent = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class with a literal kind; its tool makes actions of it."""
        super().__pydantic_init_subclass__(**kwargs)
        if "tool_spec" in cls.__dict__:
            cls.tool_spec = replace(cls.tool_spec, convert=cls.from_call)

    @classmethod
    def is_offered(cls, agent: AgentSpec) -> bool:
        """Say whether CodeActAgent offers the tool of this kind."""
        return bool(cls.enabled_by and getattr(agent, cls.enabled_by))

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """Return the action that a tool call asks for. Here the arguments are its fields, under the same names.

        Raises:
            ToolCallError: an argument is missing or unknown; the text is for the model.
            ValidationError: an argument does not fit.
        """
        if cls.argument is None:
            return cls.model_validate(known_arguments(cls.tool_spec, arguments))
        name, field = cls.argument
        risk = {RISK: risk_in(arguments)} if RISK in cls.tool_spec.parameters["properties"] else {}
        return cls.model_validate({field: required_text(arguments, name, cls.tool_spec.name), **risk})

    def answer(self, task_list: Sequence[Any]) -> Observation | None:  # noqa: ARG002  (subclasses use it)
        """Return the observation that settles the action in the step that decided it; None: somebody has to act.

        Args:
            task_list: the agent's, before this action.
        """
        return None

    def as_answer(self, observation: Observation) -> Observation:
        """Return what a tool worker answers this action with, as an observation that may answer it."""
        return observation

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(self.sentence, "cyan"))

    @property
    def user_text(self) -> str:
        """How the model reads the action when a person did it."""
        return self.user_template.format_map(self.__dict__) or f"User requested: {self.sentence}"

    @property
    def asked(self) -> tuple[Paragraph, ...]:
        """Everything that the action would do, for a person who is asked about it."""
        return (Paragraph(self.sentence, "cyan", "  "),)


class Observation(Event):
    """The result of an action, or what the environment reports; `unsandboxed` if it ran in no sandbox.

    Attributes:
        is_cut: the model sees only the beginning and the end of a long text.
        is_problem: people should notice it.
        agent_template: the text that the model sees, with the names of fields in braces.
    """

    is_shown_to_model: ClassVar[bool] = True
    is_shown_to_people: ClassVar[bool] = True
    is_cut: ClassVar[bool] = True
    is_problem: ClassVar[bool] = False
    agent_template: ClassVar[str] = "{content}"

    content: str = ""
    unsandboxed: bool | None = None

    @property
    def agent_text(self) -> str:
        """The text that the model sees, before it is cut; empty: nothing."""
        return self.agent_template.format_map(self.__dict__)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.content, "red", "  ! ") if self.is_problem else Paragraph(self.content, "dim", "  "),)


@lru_cache(maxsize=NAMES_KEPT)
def _names(names: frozenset[str]) -> set[str]:
    return set(names)


@lru_cache(maxsize=NAMES_KEPT)
def _is_part(kind: type) -> bool:
    """Return whether values of a type are parts; `isinstance` with a model's class costs several times as much."""
    return issubclass(kind, Part)


def share_names(part: BaseModel) -> None:
    """Let a frozen value, and what it consists of, hold the names of its set fields together with all others like it.

    Pydantic gives each its own set of them, which takes more memory than most events.
    """
    object.__setattr__(part, "__pydantic_fields_set__", _names(frozenset(part.__pydantic_fields_set__)))
    for value in part.__dict__.values():
        if _is_part(type(value)):  # type: ignore[arg-type]
            share_names(value)


def with_id(event: EventT, event_id: int) -> EventT:
    """Return the event under the id the log gave it."""
    return event.model_copy(update={"id": event_id})
