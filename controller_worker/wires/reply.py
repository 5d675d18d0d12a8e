"""What every wire form reads from a reply, before it is timed and priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller_worker.llm.llm import Completion, Usage
from controller_worker.messages.messages import ToolCall

TOKENS_LIMIT = 1_000_000_000
"""More is no number of tokens, and nothing that budgets could count."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of a completion that a reply holds; see `Completion`."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    thinking_blocks: tuple[Mapping[str, Any], ...]
    model: str
    response_id: str
    stop_reason: str
    usage: Usage

    def completion(
        self, *, cost_usd: float | None, latency_seconds: float, quota_left: Mapping[str, int] | None = None
    ) -> Completion:
        """Return the completion."""
        return Completion(
            text=self.text,
            tool_calls=self.tool_calls,
            thinking_blocks=self.thinking_blocks,
            model=self.model,
            response_id=self.response_id,
            stop_reason=self.stop_reason,
            usage=self.usage,
            cost_usd=cost_usd,
            latency_seconds=latency_seconds,
            quota_left=quota_left or {},
        )


def token_count(value: Any) -> int:
    """Return a number of tokens as a provider gave it; what is no count is 0, so that no cost is negative or absurd."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= TOKENS_LIMIT else 0


def counts_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage of a reply; one of another form is none: the reply is paid for, and no worse for it."""
    usage = reply.get("usage")
    return usage if isinstance(usage, Mapping) else {}
