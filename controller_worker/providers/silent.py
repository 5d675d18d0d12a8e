"""A model that makes no call and costs nothing, for agents that decide without a model.

For an agent whose loop is a program in the sandbox, it returns the program's message and reported cost.
"""

from __future__ import annotations

from controller_worker.providers.llm import CallUsage, Completion, ModelRequest

SILENT_MODEL = "silent"


class SilentLLM:
    """The backend for the model `silent`."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Return the answer in the request, or an empty one. See `LLM.complete`."""
        if isinstance(request.answer, Exception):
            raise request.answer
        if request.answer is not None:
            return request.answer
        return Completion(
            text="",
            tool_calls=(),
            thinking_blocks=(),
            model=SILENT_MODEL,
            response_id="",
            stop_reason="stop",
            usage=CallUsage(),
            cost_usd=0.0,
            latency_seconds=0.0,
        )

    async def aclose(self) -> None:
        """See `LLM.aclose`."""
