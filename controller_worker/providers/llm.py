"""The protocol of all models, and its values.

Holds: `complete` makes one attempt; it returns a whole reply or raises a `ModelError`. A cancelled call closes its
connection within a second. Token counts and costs are never negative. Streamed pieces are for display only; the
reply that `complete` returns is complete without them.
Does not: retry, wait for a quota, keep a budget.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from broker.contract import TokenRecord, ToolSpec
from controller_worker.providers.messages.messages import Message, ToolCall
from controller_worker.providers.packed_tokens import PackedTokens


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed reply.

    Attributes:
        kind: `text`, `thinking`, or `call` for the raw text of a tool call. `superseded` means that the call failed and
            the pieces shown before are void.
        text: the added text; a tool call starts with its name.
    """

    kind: Literal["text", "thinking", "call", "superseded"]
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """The recorded tokens that the prompt of a rollout continues.

    Attributes:
        tokens: the prompt and the reply of the previous call; empty if a segment starts.
        messages: the number of messages in that prompt; `digest` covers these and the tools.
        model: the model that sampled them, as named in the settings.
        hint: the likely reason of a new segment, if there are no tokens to continue.
    """

    tokens: PackedTokens = field(default_factory=PackedTokens)
    messages: int = 0
    digest: str = ""
    model: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The exact tokens of a reply.

    Attributes:
        prompt: the new tokens of the prompt, compressed: many replies may wait for their append at once.
        reply: the record of the sampled tokens, without the prompt.
        start: the tokens before them in their segment.
        messages: the messages of the prompt; `digest` covers these and the tools.
        reason: why they start a new segment; empty if they continue one, or are the first.
    """

    prompt: PackedTokens
    reply: TokenRecord
    start: int
    messages: int
    digest: str
    reason: str = ""

    def to_bytes(self) -> bytes:
        """Return the record of the prompt and the reply as bytes. It takes milliseconds; call it in a thread."""
        return replace(self.reply, prompt=self.prompt.unpack()).to_bytes()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The request of one step to a model.

    Attributes:
        messages: in order, at least one. Pass the same `Message` objects in later requests, so that a backend can reuse
            what it serialized.
        tools: the tools that the model may call; may be empty.
        conversation_id: the conversation of the step.
        iteration: the number of replies in the conversation so far.
        workspace: the directory of the conversation's tools, as seen by the tools.
        temperature: overrides the configured one. OpenHands asks again with 1.0 after an empty reply.
        stop: the reply ends before the first of these texts.
        on_delta: called with each piece as it arrives, on the event loop; must not block. None requests the reply in
            one piece, which costs less. A failed call may have delivered pieces before its failure.
        service: the purpose of the call: `agent` for a step, `condenser` for a summary of the history, `critic` for a
            verdict on a finish.
        carry: handles the request body instead of the connection and returns the answer, parsed from JSON; see
            `batching`. None to use the connection.
        output_schema: the schema of an answer without tool calls, for models that can enforce it; None for none.
        answer: the answer or error of the model `silent`; None for an empty reply.
        rollout: the tokens that the prompt continues; None if exact tokens are not needed.
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
    rollout: TokenPrefix | None = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("The messages list is empty. At least one message is required.")


@dataclass(frozen=True, slots=True)
class CallUsage:
    """Token counts of one call.

    Attributes:
        prompt_tokens: all tokens sent, including those read from and written to the provider's cache.
        completion_tokens: all tokens generated, including thinking.
        cache_read_tokens: the part of the prompt read from the cache.
        cache_write_tokens: the part of the prompt written to the cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete reply.

    Attributes:
        text: empty when the model only calls tools.
        tool_calls: in the order written.
        thinking_blocks: to be sent back with the assistant message built from this reply.
        model: as the provider names it.
        response_id: the provider's id of the reply.
        stop_reason: `stop`, `tool_calls`, `length` (cut off), `content_filter`, or the provider's own word.
        usage: as the provider counted.
        cost_usd: None when the price of the model is not known.
        latency_seconds: from the request to the end of the reply.
        quota_left: the remaining quota reported by the provider; see `quota_headers`.
        asked: the settings' name of the model that answered; empty until known.
        is_usage_estimated: usage and cost are our estimate, because the provider reported nothing or implausible
            values.
        tokens: the exact tokens; None unless the request has a `rollout`.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    thinking_blocks: tuple[Mapping[str, Any], ...]
    model: str
    response_id: str
    stop_reason: str
    usage: CallUsage
    cost_usd: float | None
    latency_seconds: float
    quota_left: Mapping[str, int] = field(default_factory=dict)
    asked: str = ""
    is_usage_estimated: bool = False
    tokens: ReplyTokens | None = None


class LLM(Protocol):
    """A model that can be called."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the model once.

        Cancelling the task closes the connection within a second. The provider may bill the part it generated.

        Raises:
            ModelError: see `controller_worker.providers.errors` for its subclasses. Retry the call if `retryable` is
                set.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections. The model must not be called afterwards."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A model whose provider can also count prompts."""

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """Return the token count of a request's prompt; None if the provider does not count.

        Raises:
            ModelError: the provider could not be reached.
        """
        ...


async def count_prompt_tokens(llm: LLM, request: ModelRequest) -> int | None:
    """Return the provider's token count; None if it cannot count. Raises the same errors as `count_tokens`."""
    return await llm.count_tokens(request) if isinstance(llm, CountsTokens) else None
