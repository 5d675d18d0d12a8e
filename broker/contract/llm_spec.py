"""Which model a conversation uses, and what every value inside an event is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A value inside an event."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class LLMSpec(Part):
    """Which model a conversation uses. Address and key are the controller's, never the conversation's.

    Attributes:
        model: a profile or a model; None: LLM_MODEL of the controller workers. Of the other fields, None: as there.
    """

    model: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    caching_prompt: bool | None = None
