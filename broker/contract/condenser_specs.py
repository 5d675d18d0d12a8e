"""Specifications of condensers: strategies to shorten a long history (OpenHands section 8: types, names, defaults)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from broker.contract.llm_spec import EventValue, LLMSpec
from broker.contract.plain_json import JsonObject


class CondenserSpec(EventValue):
    """The base of all condenser specifications (OpenHands section 8: types, names, defaults).

    Attributes:
        TYPES: all specifications by their type.
        handles_requests: whether a request for a condensation shortens the history, whatever its length.
    """

    TYPES: ClassVar[dict[str, type[CondenserSpec]]] = {}
    handles_requests: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a specification with a literal type."""
        super().__init_subclass__(**kwargs)
        if isinstance(name := cls.__dict__.get("type"), str):
            CondenserSpec.TYPES[name] = cls


class NoOpCondenserSpec(CondenserSpec):
    """Show the whole history."""

    type: Literal["noop"] = "noop"


class ObservationMaskingCondenserSpec(CondenserSpec):
    """Show a placeholder for observations older than the last `attention_window` events."""

    type: Literal["observation_masking"] = "observation_masking"
    attention_window: int = Field(default=100, ge=1)


class BrowserOutputCondenserSpec(CondenserSpec):
    """Show a placeholder for all but the last `attention_window` browser pages."""

    type: Literal["browser_output_masking"] = "browser_output_masking"
    attention_window: int = Field(default=1, ge=1)


class RecentEventsCondenserSpec(CondenserSpec):
    """Show the first `keep_first` events and the latest ones, `max_events` in all."""

    type: Literal["recent"] = "recent"
    keep_first: int = Field(default=1, ge=0)
    max_events: int = Field(default=100, ge=1)


class ConversationWindowCondenserSpec(CondenserSpec):
    """Forget the older half of the history on request. No model is called."""

    type: Literal["conversation_window"] = "conversation_window"
    handles_requests: ClassVar[bool] = True


class RollingCondenserSpec(CondenserSpec):
    """Shorten the history to half of `max_size` events whenever it exceeds `max_size`.

    Attributes:
        keep_first: how many of the first events are never forgotten.
    """

    handles_requests: ClassVar[bool] = True
    keep_first: int = Field(default=1, ge=0)
    max_size: int = Field(default=100, ge=2)

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.keep_first >= self.max_size // 2:
            raise ValueError(f"keep_first ({self.keep_first}) must be less than half of max_size ({self.max_size})")
        return self


class AmortizedForgettingCondenserSpec(RollingCondenserSpec):
    """Forget the events between the first and the latest ones. No model is called."""

    type: Literal["amortized"] = "amortized"


class AskingCondenserSpec(RollingCondenserSpec):
    """The base of condensers that call a model.

    Attributes:
        llm: the model; None for the conversation's own.
        max_event_length: the longest text of one event in the model's prompt, in characters.
    """

    llm: LLMSpec | None = None
    max_event_length: int = Field(default=10_000, ge=100)


class LLMSummarizingCondenserSpec(AskingCondenserSpec):
    """Let a model summarise the forgotten events."""

    type: Literal["llm"] = "llm"


class LLMAttentionCondenserSpec(AskingCondenserSpec):
    """Let a model choose the events to keep."""

    type: Literal["llm_attention"] = "llm_attention"


class StructuredSummaryCondenserSpec(AskingCondenserSpec):
    """Let a model fill in a form about the forgotten events."""

    type: Literal["structured"] = "structured"


class CondenserPipelineSpec(CondenserSpec):
    """Apply several condensers in turn; stop after the first that condenses."""

    type: Literal["pipeline"] = "pipeline"
    condensers: tuple[AnyCondenserSpec, ...]


class OtherCondenserSpec(CondenserSpec):
    """A condenser without its own specification, such as one from an installed package.

    Attributes:
        type: the name of its entry point in the group `deckhands.condensers`, or the type that its class declares.
        settings: validated by the condenser.
        answers_requests: see `CondenserSpec.handles_requests`.
    """

    type: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    settings: JsonObject = Field(default_factory=dict)
    answers_requests: bool = False


def _parse_spec(value: Any) -> Any:
    """Parse plain values as the specification of their type."""
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        raise ValueError("a condenser needs a type")
    return CondenserSpec.TYPES.get(str(value["type"]), OtherCondenserSpec).model_validate(value)


AnyCondenserSpec = Annotated[SerializeAsAny[CondenserSpec], BeforeValidator(_parse_spec)]
CondenserPipelineSpec.model_rebuild()

DEFAULT_CONDENSER = CondenserPipelineSpec(
    condensers=(
        ConversationWindowCondenserSpec(),
        BrowserOutputCondenserSpec(attention_window=2),
        LLMSummarizingCondenserSpec(keep_first=4, max_size=120),
    )
)
"""The default of OpenHands' web server."""


def handles_requests(condenser: CondenserSpec) -> bool:
    """Return whether the condenser answers a request for a condensation."""
    if isinstance(condenser, CondenserPipelineSpec):
        return any(handles_requests(part) for part in condenser.condensers)
    if isinstance(condenser, OtherCondenserSpec):
        return condenser.answers_requests
    return condenser.handles_requests
