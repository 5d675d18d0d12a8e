"""The base classes of all event kinds: `Event`, `Action` and `Observation`.

Holds: every fact that is true of all events of a kind is on its class. Defining a class registers its kind.
Names, fields and defaults follow OpenHands V0 (section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum, StrEnum
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from broker.contract.deferred_models import DeferredModel
from broker.contract.specs import AgentSpec, EventValue
from broker.contract.tool_arguments import RISK, parse_arguments, parse_risk, require_text
from broker.contract.tool_specs import OutcomePolicy, ToolSpec
from broker.runtime import parse_traceparent

NAME_SETS_CACHE_SIZE = 1_024
"""The size of the cache for sets of field names; each kind uses several."""

FAILURES = ("observation.error", "observation.outcome_unknown")
"""How a tool worker reports that any action failed."""

_set_attribute = object.__setattr__  # a frozen value is completed before it is shared

EventT = TypeVar("EventT", bound="Event")
Role = Literal["", "user", "action", "detail", "problem", "success", "added", "removed"]
"""What a paragraph is to its reader: a user's words, an action, a detail of little weight, …; empty for plain text."""


class EventSource(StrEnum):
    """The origin of an event."""

    AGENT = "agent"
    USER = "user"
    ENVIRONMENT = "environment"


class ActionSecurityRisk(IntEnum):
    """The estimated risk of an action; the integers are OpenHands' wire values."""

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
    """A text that the log viewer shows for an event. Empty paragraphs are not shown.

    Does not: colour or shorten the text; see `deckhands.client.reading.rendering`.

    Attributes:
        role: the meaning of the text; each viewer decides its appearance.
        mark: a prefix of the first line; the other lines are indented to match.
        max_lines: the viewer cuts the middle of a longer text.
    """

    text: str
    role: Role = ""
    mark: str = ""
    max_lines: int = 20


class ToolCallMetadata(EventValue):
    """The tool call that an action or observation belongs to.

    Differs: refers to the model reply by event id. The original copies the whole response into every event.
    """

    function_name: str
    tool_call_id: str
    reply_id: int
    total_calls_in_response: int = 1


class BlobRef(EventValue):
    """The address of the full text of a shortened field: its SHA-256 and its size in bytes of UTF-8."""

    sha256: str
    size_bytes: int


class WorkspaceUse(StrEnum):
    """The relation of an observation to the files of a workspace."""

    NONE = "none"
    READ = "read"
    CHANGED = "changed"


Traceparent = Annotated[str | None, BeforeValidator(parse_traceparent)]
"""The context of a trace. It is not authenticated, and an invalid one counts as None."""


def drop_class_annotations(model: type[BaseModel]) -> None:
    """Drop the annotations of a model's class variables, once the class exists.

    Pydantic evaluates them again for each subclass, which would take a fifth of the time to import all kinds. It
    knows the names of class variables from `__class_vars__`, and so do subclasses.
    """
    annotations = model.__annotations__
    for name in model.__class_vars__:
        annotations.pop(name, None)


class Event(BaseModel, metaclass=DeferredModel):
    """Anything that happened in a conversation.

    A subclass with a literal `kind` is a kind of event. Facts that are true of all events of a kind are on its class.

    Attributes:
        kind: the name of the kind on the wire.
        id: 1, 2, 3 … within the conversation; 0 until the log has assigned it. Not part of the stored bytes.
        timestamp: when the writer created the event, aware UTC; None until it is written.
        source: the origin of the event.
        cause: the id of the action that an observation answers.
        tool_call_metadata: the model's tool call that the event belongs to; None if there is none.
        blobs: the shortened fields (dotted paths) and the addresses of their full texts.
        KINDS: all kinds by their name on the wire.
        runnable: a tool worker executes it.
        outcome: the recovery policy if the worker died and no outcome was recorded.
        is_decided: only the controller writes it, unless it answers a runnable action. A replay decides it again.
        is_shown_to_model: the model sees it. If False, the model sees it only within its tool call.
        is_shown_to_people: the log viewer of a terminal shows it.
        counts_for_loops: loop detection compares it.
        workspace_use: whether it read or changed files of the workspace.
        sentence_template: the one-line summary, with field names in braces.
        repeated_fields: nested models that are often equal in many conversations.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    KINDS: ClassVar[dict[str, type[Event]]] = {}
    repeated_fields: ClassVar[tuple[str, ...]] = ()
    runnable: ClassVar[bool] = False
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.AT_MOST_ONCE
    is_decided: ClassVar[bool] = False
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class with a literal kind."""
        super().__init_subclass__(**kwargs)
        kind = cls.__dict__.get("kind")
        if isinstance(kind, str):
            assert kind not in cls.KINDS or cls.KINDS[kind].__qualname__ == cls.__qualname__, kind
            Event.KINDS[kind] = cls

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Let Pydantic build subclasses faster."""
        super().__pydantic_init_subclass__(**kwargs)
        drop_class_annotations(cls)

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
    def required_pool(self) -> str:
        """The pool whose tool workers run this action; empty for those that hold the conversation's workspace."""
        return ""

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return self.sentence_template.format_map(self.__dict__)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """The paragraphs that the log viewer shows, if `is_shown_to_people`."""
        return (Paragraph(self.sentence, "detail"),)


drop_class_annotations(Event)


class Action(Event):
    """A request to do something.

    Attributes:
        tool_spec: the tool through which the model requests this action, if the kind has its own tool.
        user_template: the text that the model reads if a user performed the action; the default is made from
            `sentence`.
        argument: the tool's only argument besides the risk, and the field that it fills; None: see `from_call`.
        enabled_by: the field of `AgentSpec` that makes CodeActAgent offer the tool; empty if it never does.
        answered_by: the kinds of a tool worker's observation; empty for the kind of the same name. Any action may fail.
        traceparent: the span that led to the action, see `broker.runtime.tracing`; None without tracing or if invalid.
    """

    is_shown_to_model: ClassVar[bool] = True
    is_shown_to_users: ClassVar[bool] = True
    answered_by: ClassVar[tuple[str, ...]] = ()
    tool_spec: ClassVar[ToolSpec]
    user_template: ClassVar[str] = ""
    argument: ClassVar[tuple[str, str] | None] = None
    enabled_by: ClassVar[str] = ""

    thought: str = ""
    traceparent: Traceparent = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a class with a literal kind, and let its tool create actions of this class."""
        super().__init_subclass__(**kwargs)
        if "tool_spec" in cls.__dict__:
            cls.tool_spec = replace(cls.tool_spec, convert=cls.from_call)

    @classmethod
    def is_offered(cls, agent: AgentSpec) -> bool:
        """Return whether CodeActAgent offers the tool of this kind."""
        return bool(cls.enabled_by and getattr(agent, cls.enabled_by))

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """Return the action that a tool call requests. By default, its fields are the arguments of the same names.

        Raises:
            ToolCallError: an argument is missing or unknown. The text is for the model.
            ValidationError: an argument is invalid.
        """
        if cls.argument is None:
            return cls.model_validate(parse_arguments(cls.tool_spec, arguments))
        name, field = cls.argument
        risk = {RISK: parse_risk(arguments)} if RISK in cls.tool_spec.parameters["properties"] else {}
        return cls.model_validate({field: require_text(arguments, name, cls.tool_spec.name), **risk})

    def answer(self, task_list: Sequence[Any]) -> Observation | None:  # noqa: ARG002  (subclasses use it)
        """Return the observation that answers the action without a worker; None if the action must be executed.

        Args:
            task_list: the agent's task list before this action.
        """
        return None

    def may_be_answered_by(self, observation: Observation) -> bool:
        """Return whether a tool worker may answer this action so: the kind fits, and the tool call is the same."""
        kinds = self.answered_by or (self.kind.replace("action.", "observation.", 1),)
        is_known = observation.kind in (*kinds, *FAILURES)
        return is_known and observation.tool_call_metadata == self.tool_call_metadata

    def to_answer(self, observation: Observation) -> Observation:
        """Convert the tool worker's observation into the observation that is logged for this action."""
        return observation

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(self.sentence, "action"))

    @property
    def user_text(self) -> str:
        """The text that the model reads if a user performed the action."""
        return self.user_template.format_map(self.__dict__) or f"User requested: {self.sentence}"

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """The complete effect of the action, shown to the user who is asked to confirm it."""
        return (Paragraph(self.sentence, "action", "  "),)


class Observation(Event):
    """The result of an action, or a report of the environment. `unsandboxed` is set if it ran in no sandbox.

    Attributes:
        is_cut: the model sees only the head and tail of a long text.
        is_problem: the log viewer highlights it.
        agent_template: the text that the model sees, with field names in braces.
    """

    is_shown_to_model: ClassVar[bool] = True
    is_shown_to_users: ClassVar[bool] = True
    is_cut: ClassVar[bool] = True
    is_problem: ClassVar[bool] = False
    agent_template: ClassVar[str] = "{content}"

    content: str = ""
    unsandboxed: bool | None = None

    @property
    def agent_text(self) -> str:
        """The text that the model sees, before it is cut; empty for none."""
        return self.agent_template.format_map(self.__dict__)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        role: Role = "problem" if self.is_problem else "detail"
        return (Paragraph(self.content, role, "  ! " if self.is_problem else "  "),)


_new = object.__new__


@lru_cache(maxsize=NAME_SETS_CACHE_SIZE)
def _share_set(names: frozenset[str]) -> set[str]:
    return set(names)


@cache
def _find_part_fields(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that may hold values with fields of their own."""
    return tuple(name for name, field in kind.model_fields.items() if _may_hold_parts(field.annotation))


def _may_hold_parts(annotation: Any) -> bool:
    return any(map(_may_hold_parts, get_args(annotation))) or (isinstance(annotation, type) and _is_part(annotation))


@cache
def _is_part(kind: type) -> bool:
    """Return whether values of a type are parts. `isinstance` with a model's class is several times slower."""
    return issubclass(kind, EventValue)


def share_names(part: BaseModel) -> None:
    """Share the sets of field names of a frozen value and its nested values with all equal sets.

    Pydantic creates a set per value, which takes more memory than most events.
    """
    _set_attribute(part, "__pydantic_fields_set__", _share_set(frozenset(part.__pydantic_fields_set__)))
    values = part.__dict__
    for name in _find_part_fields(type(part)):
        value = values[name]
        if value is None:
            continue
        if type(value) is tuple:
            for nested in value:
                if _is_part(type(nested)):  # type: ignore[arg-type]
                    share_names(nested)
        elif _is_part(type(value)):  # type: ignore[arg-type]
            share_names(value)


def with_id(event: EventT, event_id: int) -> EventT:
    """Return a copy of the event with the id that the log assigned."""
    return with_fields(event, id=event_id)


def with_fields(event: EventT, **values: Any) -> EventT:
    """Return a copy of the event with other values of fields, which are not validated.

    A step does this for each of its events. `model_copy` takes four times as long, because it supports private and
    further attributes, which events do not have.
    """
    other = _new(type(event))
    _set_attribute(other, "__dict__", {**event.__dict__, **values})
    _set_attribute(other, "__pydantic_fields_set__", event.__pydantic_fields_set__ | values.keys())
    _set_attribute(other, "__pydantic_extra__", None)
    _set_attribute(other, "__pydantic_private__", None)
    return other
