"""The verification of a conversation's log, over HTTP."""

from __future__ import annotations

from typing import Self

from fastapi import APIRouter
from pydantic import BaseModel, Field

from deckhands.client import Verification
from deckhands.server.conversations import ReadableId
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.models import ID

routes = APIRouter(prefix="/conversations", tags=["conversations"])


class ShownViolation(BaseModel):
    """A violation of the specification of a log.

    Attributes:
        rule: the name of the rule.
        event_id: the event that shows it; 0 for the log as a whole.
        text: a sentence. It may quote names from the log.
    """

    rule: str = Field(examples=["observation"])
    event_id: int = Field(examples=[7])
    text: str = Field(examples=["event 7 (observation.run) answers action 5, which event 6 has answered"])


class ShownVerification(BaseModel):
    """The result of checking a log against the specification of a log.

    Attributes:
        source: the conversation.
        holds: the log is correct.
        events: the number of events.
        violations: the first 100 violations, in the order of the log.
    """

    source: str = Field(examples=[ID])
    holds: bool
    events: int = Field(examples=[46])
    violations: list[ShownViolation]

    @classmethod
    def of(cls, found: Verification) -> Self:
        """Convert a result to the form of the API."""
        return cls.model_validate(found.as_json())


@routes.get("/{conversation_id}/verification", summary="Verify the log")
async def verification(gateway: GatewayOf, _principal: Reader, conversation_id: ReadableId) -> ShownVerification:
    """Check the log of a conversation, in the store or the archive, and show the violations.

    A conversation in progress is checked up to its last event.
    """
    return ShownVerification.of(await gateway.client.verify(conversation_id))
