"""The one protocol every model is called through, and the values that pass it.

Holds: `complete` makes one attempt and either returns a whole reply or raises a `ModelError`; a cancelled call has
closed its connection within a second; token counts and costs are never negative; what is streamed is only shown, never
used: the reply that `complete` returns is the whole one.
Does not: retry, wait for a quota, keep a budget.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from broker.contract import ToolSpec
from controller_worker.providers.messages.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is on its way.

    Attributes:
        kind: `text`, `thinking`, or `call` for the raw text of a tool call; `superseded` for none: the call has
            failed, and what was shown of it no longer counts.
        text: what was added; of a call its name first.
    """

    kind: Literal["text", "thinking", "call", "superseded"]
    text: str


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What one step asks of a model.

    Attributes:
        messages: in order, at least one. Pass the same `Message` objects again in later requests: what a backend
            made of them is then reused.
        tools: what the model may call; empty for none.
        conversation_id: whose step this is.
        iteration: how many replies the conversation has had so far.
        workspace: the directory of the conversation's tools, as the tools see it.
        temperature: instead of the configured one. OpenHands asks again with 1.0 after an empty reply.
        stop: the reply ends before the first of these texts.
        on_delta: called with each piece as it arrives, on the event loop; must not block. None asks for the reply in
            one piece, which costs less. A call that fails may have shown pieces before.
        service: what the answer is for: `agent` for a step, `condenser` for a summary of the history,
            `critic` for a verdict on a finish.
        carry: takes the body of the request instead of the connection, and returns the answer, parsed from JSON; see
            `batching`. None for a call by the connection.
        output_schema: what the answer has to fit if it calls no tool, for models that can be held to it; None for
            none.
        answer: what the model `silent` answers, or raises; None for an empty reply.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    conversation_id: str
    iteration: int
    workspace: str
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    on_delta: Callable[[Delta], None] | None = None
    service: Literal["agent", "condenser", "critic"] = "agent"
    carry: Callable[[bytes], Awaitable[Any]] | None = None
    output_schema: Mapping[str, Any] | None = None
    answer: Completion | Exception | None = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("The messages list is empty. At least one message is required.")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call.

    Attributes:
        prompt_tokens: all that were sent, those read from and written to the provider's cache included.
        completion_tokens: all that were generated, thinking included.
        cache_read_tokens: the part of the prompt that came from the cache.
        cache_write_tokens: the part of the prompt that was put into the cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply.

    Attributes:
        text: empty when the model only calls tools.
        tool_calls: in the order written.
        thinking_blocks: to be replayed with the assistant message this becomes.
        model: as the provider names it.
        response_id: the provider's id of the reply.
        stop_reason: `stop`, `tool_calls`, `length` (cut off), `content_filter`, or the provider's own word.
        usage: as the provider counted.
        cost_usd: None when the price of the model is not known.
        latency_seconds: from the request to the end of the reply.
        quota_left: what the provider says is left for now; see `quota_headers`.
        asked: the model that has answered, as its settings name it; empty until they are known.
        is_usage_estimated: usage and cost are our estimate, because the provider counted nothing, or what cannot be.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    thinking_blocks: tuple[Mapping[str, Any], ...]
    model: str
    response_id: str
    stop_reason: str
    usage: Usage
    cost_usd: float | None
    latency_seconds: float
    quota_left: Mapping[str, int] = field(default_factory=dict)
    asked: str = ""
    is_usage_estimated: bool = False


class LLM(Protocol):
    """A model that can be asked."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask once.

        Cancelling the task closes the connection within a second; the provider may bill what it had begun.

        Raises:
            ModelError: see `controller_worker.providers.errors` for the family; `retryable` tells whether to ask again.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections. The model must not be asked any more."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A model whose provider counts prompts, too."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return how many tokens the prompt of a request has; None where the provider does not say.

        Raises:
            ModelError: it could not be asked.
        """
        ...


async def counted_tokens(llm: LLM, request: ModelRequest) -> int | None:
    """Return what the provider of a model counts, or None if it cannot be asked; raises what `count_tokens` does."""
    return await llm.count_tokens(request) if isinstance(llm, CountsTokens) else None
