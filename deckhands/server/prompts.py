"""The prompt of a model call, over HTTP.

A separate process builds a prompt, which takes a second of CPU, so only a few are built at a time, at most half of them
for one tenant.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from broker.contract import Event
from broker.runtime import UsageError
from deckhands.client import make_prompt
from deckhands.server.conversations import ReadableId
from deckhands.server.dependencies import MAX_EVENT_ID, GatewayOf, Reader
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/conversations", tags=["conversations"])
MAX_LOG_CHARS = 32 * 2**20
"""The texts of a log from which a server makes a prompt."""


class ShownCall(BaseModel):
    """A tool call that the model has made."""

    id: str = Field(examples=["call_1"])
    name: str = Field(examples=["execute_bash"])
    arguments: str = Field(examples=['{"command": "ls"}'])


class ShownMessage(BaseModel):
    """A message of a prompt. `content` has its parts as texts; a picture is represented by its size."""

    role: str = Field(examples=["user"])
    content: list[str] = Field(examples=[["List the files"]])
    tool_calls: list[ShownCall]
    tool_call_id: str = Field(examples=[""])
    name: str = Field(examples=[""])


class ShownPrompt(BaseModel):
    """The prompt of a model call.

    Attributes:
        after: the last event that it contains.
        model: empty if the conversation names none and so uses the workers' default.
        service: `agent` for a step, `condenser` if the history is to be shortened first.
        tools: names of the tools that are offered.
    """

    after: int = Field(examples=[5])
    model: str = Field(examples=["anthropic/claude-sonnet-4-5"])
    service: str = Field(examples=["agent"])
    tools: list[str] = Field(examples=[["execute_bash", "finish"]])
    messages: list[ShownMessage]


CONFLICT: dict[int | str, dict[str, Any]] = {409: {"description": "there is no prompt at this event"}}


@routes.get("/{conversation_id}/prompt", summary="Show a prompt", responses=CONFLICT)
async def prompt(
    gateway: GatewayOf,
    principal: Reader,
    conversation_id: ReadableId,
    at: Annotated[int, Query(ge=1, le=MAX_EVENT_ID, description="the last event that the prompt contains")],
) -> ShownPrompt:
    """Show the prompt of a model call after an event, rebuilt from the log.

    To see the prompt of a reply, name the event before it. Only a few prompts are built at a time; further requests are
    refused with 429 or 503.
    """
    with gateway.prompts.holding(principal.tenant):
        events: list[Event] = []
        room = MAX_LOG_CHARS
        async for page in gateway.client.pages(conversation_id, is_whole=True):
            events += page
            room -= sum(len(event.model_dump_json()) for event in page)
            if len(events) >= at or room < 0:
                break
        if room < 0:
            raise Problem(409, "conflict", "The log is too long.", remedy="`deckhands prompt ID@EVENT` shows it.")
        if len(events) < at:
            raise Problem(404, "unknown_event", f"The conversation has no event {at}.", remedy=f"It has {len(events)}.")
        try:
            return ShownPrompt.model_validate(await make_prompt(events[:at]))
        except UsageError as error:
            raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
