"""The model of a conversation, and the base class of values inside events."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from broker.contract.deferred_models import DeferredModel


class EventValue(BaseModel, metaclass=DeferredModel):
    """A value inside an event."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class LLMSpec(EventValue):
    """The model of a conversation. Its address and key belong to the controller, never to the conversation.

    Attributes:
        model: a profile or a model; None for LLM_MODEL of the controller workers. Other fields that are None use the
            workers' values.
    """

    model: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    caching_prompt: bool | None = None
