"""A model that says nothing and costs nothing, for agents that decide without one."""

from __future__ import annotations

from controller_worker.llm.llm import Completion, ModelRequest, Usage

MODEL = "silent"


class SilentLLM:
    """The backend for the model `silent`."""

    async def complete(self, request: ModelRequest) -> Completion:  # noqa: ARG002  (whatever it is asked)
        """Return an empty reply. See `LLM.complete`."""
        return Completion(
            text="",
            tool_calls=(),
            thinking_blocks=(),
            model=MODEL,
            response_id="",
            stop_reason="stop",
            usage=Usage(),
            cost_usd=0.0,
            latency_seconds=0.0,
        )

    async def aclose(self) -> None:
        """See `LLM.aclose`."""
