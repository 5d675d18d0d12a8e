"""Custom tools as users write them; tool workers of the tests load them by name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from broker.tools.custom_tools import ToolContext, ToolFailed, custom_tool


def note(line: str) -> None:
    """Leave a trace of a call where the tests look for it."""
    with Path(os.environ["EXAMPLE_TOOLS_TRACE"]).open("a") as file:
        file.write(line + "\n")


def add(first: int, second: Annotated[int, Field(description="What is added.")] = 1) -> int:
    """Add two numbers."""
    return first + second


@custom_tool(outcome="idempotent", timeout_seconds=0.2)
async def wait_for_ever() -> str:
    """Wait for an event that never comes."""
    await asyncio.Event().wait()
    return "never"


@custom_tool(pool="gpu")
def render(scene: str, context: ToolContext) -> dict[str, str]:
    """Render a scene."""
    note(f"begin-{context.idempotency_key}")
    return {"content": f"rendered {scene}", "key": context.idempotency_key}


@custom_tool
def fail(is_expected: bool) -> str:
    """Fail."""
    if is_expected:
        raise ToolFailed("The moon is in the way.", remedy="Wait for it to set.")
    raise RuntimeError("broken")


@custom_tool(outcome="checkable")
class PlaceOrder:
    """Place an order, once."""

    class Action(BaseModel):
        """An order."""

        item: str
        count: Annotated[int, Field(ge=1)] = 1

    class Observation(BaseModel):
        """The result."""

        content: str
        number: str

    def run(self, action: Action, context: ToolContext) -> Observation:
        """Place it."""
        note(f"{context.idempotency_key} {action.item}")
        return self.Observation(content=f"Ordered {action.count} {action.item}.", number=context.idempotency_key)

    def check(self, action: Action, context: ToolContext) -> Observation | None:
        """See whether it was placed."""
        placed = Path(os.environ["EXAMPLE_TOOLS_TRACE"])
        if not placed.exists() or f"{context.idempotency_key} {action.item}\n" not in placed.read_text():
            return None
        return self.Observation(content="Had been ordered.", number=context.idempotency_key)


@custom_tool
async def linger(trace: str) -> str:
    """Run until stopped."""
    with Path(trace).open("a") as file:
        file.write("begun\n")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        with Path(trace).open("a") as file:
            file.write("stopped\n")
        raise
    return "never"


@custom_tool(pool="gpu")
def grind(trace: str, context: ToolContext) -> str:
    """Run in a thread until it is stopped."""
    with Path(trace).open("a") as file:
        file.write("begun\n")
    context.cancelled.wait()
    with Path(trace).open("a") as file:
        file.write("stopped\n")
    return "too late"
