"""How a long history is shortened for the model, as data (OpenHands section 8: types, names, defaults)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from broker.contract.llm_spec import LLMSpec, Part
from broker.contract.plain_json import JsonObject


class CondenserSpec(Part):
    """How a long history is shortened for the model (OpenHands section 8: types, names, defaults).

    Attributes:
        TYPES: every specification, by its type.
        handles_requests: whether a request for a condensation shortens the history, whatever its length.
    """

    TYPES: ClassVar[dict[str, type[CondenserSpec]]] = {}
    handles_requests: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register a specification with a literal type."""
        super().__pydantic_init_subclass__(**kwargs)
        named = cls.model_fields.get("type")
        if named is not None and isinstance(named.default, str):
            CondenserSpec.TYPES[named.default] = cls


class NoOpCondenserSpec(CondenserSpec):
    """Show everything."""

    type: Literal["noop"] = "noop"


class ObservationMaskingCondenserSpec(CondenserSpec):
    """Show a placeholder for observations older than the last `attention_window` events."""

    type: Literal["observation_masking"] = "observation_masking"
    attention_window: int = Field(default=100, ge=1)


class BrowserOutputCondenserSpec(CondenserSpec):
    """Show a placeholder for all but the last `attention_window` pages."""

    type: Literal["browser_output_masking"] = "browser_output_masking"
    attention_window: int = Field(default=1, ge=1)


class RecentEventsCondenserSpec(CondenserSpec):
    """Show the first `keep_first` events and the latest ones, `max_events` in all."""

    type: Literal["recent"] = "recent"
    keep_first: int = Field(default=1, ge=0)
    max_events: int = Field(default=100, ge=1)


class ConversationWindowCondenserSpec(CondenserSpec):
    """Forget the older half when asked to. No model is asked."""

    type: Literal["conversation_window"] = "conversation_window"
    handles_requests: ClassVar[bool] = True


class RollingCondenserSpec(CondenserSpec):
    """Shorten to half of `max_size` events whenever there are more.

    Attributes:
        keep_first: how many events at the beginning are never forgotten.
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
    """Forget what is between the first events and the latest. No model is asked."""

    type: Literal["amortized"] = "amortized"


class AskingCondenserSpec(RollingCondenserSpec):
    """Ask a model.

    Attributes:
        llm: None means the conversation's own model.
        max_event_length: longest text of one event in the model's prompt, in characters.
    """

    llm: LLMSpec | None = None
    max_event_length: int = Field(default=10_000, ge=100)


class LLMSummarizingCondenserSpec(AskingCondenserSpec):
    """Let a model summarise what is forgotten."""

    type: Literal["llm"] = "llm"


class LLMAttentionCondenserSpec(AskingCondenserSpec):
    """Let a model choose which events to keep."""

    type: Literal["llm_attention"] = "llm_attention"


class StructuredSummaryCondenserSpec(AskingCondenserSpec):
    """Let a model fill in a form about what is forgotten."""

    type: Literal["structured"] = "structured"


class CondenserPipelineSpec(CondenserSpec):
    """Pass the history through several condensers; the first that condenses ends it."""

    type: Literal["pipeline"] = "pipeline"
    condensers: tuple[AnyCondenserSpec, ...]


class OtherCondenserSpec(CondenserSpec):
    """A condenser without its own specification, such as one from an installed package.

    Attributes:
        type: the name of its entry point in the group `deckhands.condensers`, or what its class says.
        settings: the condenser checks them.
        answers_requests: see `CondenserSpec.handles_requests`.
    """

    type: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    settings: JsonObject = Field(default_factory=dict)
    answers_requests: bool = False


def _of_its_type(value: Any) -> Any:
    """Return plain values as the specification that their type names."""
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        raise ValueError("a condenser has a type")
    return CondenserSpec.TYPES.get(str(value["type"]), OtherCondenserSpec).model_validate(value)


AnyCondenserSpec = Annotated[SerializeAsAny[CondenserSpec], BeforeValidator(_of_its_type)]
CondenserPipelineSpec.model_rebuild()

DEFAULT_CONDENSER = CondenserPipelineSpec(
    condensers=(
        ConversationWindowCondenserSpec(),
        BrowserOutputCondenserSpec(attention_window=2),
        LLMSummarizingCondenserSpec(keep_first=4, max_size=120),
    )
)
"""What OpenHands' web server builds."""


def handles_requests(condenser: CondenserSpec) -> bool:
    """Say whether the condenser answers a request for a condensation."""
    if isinstance(condenser, CondenserPipelineSpec):
        return any(handles_requests(part) for part in condenser.condensers)
    if isinstance(condenser, OtherCondenserSpec):
        return condenser.answers_requests
    return condenser.handles_requests
