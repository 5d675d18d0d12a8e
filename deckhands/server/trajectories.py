"""The exact tokens of a rollout, over HTTP."""

from __future__ import annotations

from typing import Self

from fastapi import APIRouter
from pydantic import BaseModel, Field

from deckhands.client import Trajectory
from deckhands.server.conversations import ReadableId
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.models import ID

routes = APIRouter(prefix="/conversations", tags=["conversations"])


class ShownSegmentReply(BaseModel):
    """A reply in a segment: its event, and where its sampled tokens are."""

    event_id: int = Field(examples=[7])
    start: int = Field(examples=[812])
    end: int = Field(examples=[861])


class ShownSegment(BaseModel):
    """One sequence of tokens that a model has continued.

    Attributes:
        tokens: of prompts and replies, in order.
        mask: 1 for a sampled token, 0 for a token of a prompt.
        logprobs: the log-probability of each sampled token; 0 for a token of a prompt, null if the server named none.
        versions: the policy of each sampled token; -1 for a token of a prompt, or if the server named none.
        replies: the replies in it.
        reason: why it does not continue the previous segment; empty for the first.
    """

    tokens: list[int] = Field(examples=[[9906, 0, 42]])
    mask: list[int] = Field(examples=[[0, 0, 1]])
    logprobs: list[float | None] = Field(examples=[[0.0, 0.0, -0.25]])
    versions: list[int] = Field(examples=[[-1, -1, 3]])
    replies: list[ShownSegmentReply]
    reason: str = Field(examples=[""])


class ShownTrajectory(BaseModel):
    """The tokens of one conversation; no segments if it is no rollout."""

    conversation_id: str = Field(examples=[ID])
    segments: list[ShownSegment]

    @classmethod
    def of(cls, found: Trajectory) -> Self:
        """Convert a trajectory to the form of the API."""
        return cls.model_validate(found.as_json())


@routes.get("/{conversation_id}/trajectory", summary="Read the exact tokens")
async def trajectory(gateway: GatewayOf, _principal: Reader, conversation_id: ReadableId) -> ShownTrajectory:
    """Return the exact tokens of a rollout: those of its prompts, and those that the model sampled."""
    return ShownTrajectory.of(await gateway.client.trajectory(conversation_id))
