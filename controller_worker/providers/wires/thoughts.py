"""A model's thinking blocks: how a reply stores them, and how the history sends them back.

A reply stores blocks as its provider wrote them:

    {"type": "thinking", "thinking"}                                `reasoning_content` of DeepSeek, Kimi and others
    {"type": "thinking", "thinking", "signature"}, redacted too     Claude's
    {"type": "reasoning", "id", "summary", "encrypted_content"}     an item of OpenAI's Responses
    {"type": "call", "id", …}                                       Gemini's attachment to a call: its signature;
                                                                    `place` in the reply if its id names no call
    {"type": "claude", …}                                           Claude's other blocks: see `claude_blocks`

Holds: a model gets only blocks in its own format. Blocks of other families are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from controller_worker.providers.messages.messages import to_valid_name
from controller_worker.providers.model_features import ThoughtForm

CALL_ATTACHMENT_FIELDS = ("extra_content", "provider_specific_fields")
"""Fields of a call that must be sent back to its provider: Gemini's own, and litellm's."""

CLAUDE, CLAUDE_EDITS = "claude", "claude_edits"
"""Types of blocks that only Anthropic's Messages contain; see `claude_blocks`."""

Block = Mapping[str, Any]


def is_signed(block: Block) -> bool:
    """Return whether a thinking block is signed by Claude, which accepts no others."""
    return block.get("type") in ("thinking", "redacted_thinking") and ("signature" in block or "data" in block)


def read_thoughts(message: Mapping[str, Any], model: str) -> tuple[dict[str, Any], ...]:
    """Return the thinking blocks of a Chat Completions message, leaving out malformed ones.

    Args:
        model: the author of the message, as its provider names it.

    Raises:
        TypeError, AttributeError: the message violates the protocol.
    """
    blocks = [dict(block) for block in message.get("thinking_blocks") or () if _has_type(block)]
    if "gemini" in model.lower():  # litellm adds signatures, which Claude would take for its own and refuse
        blocks = [{name: value for name, value in block.items() if name != "signature"} for block in blocks]
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not blocks and isinstance(thought, str):
        blocks = [{"type": "thinking", "thinking": thought}]
    items = [item for item in message.get("reasoning_items") or () if isinstance(item, Mapping)]
    blocks += [{**item, "type": "reasoning"} for item in items if item.get("id") or item.get("encrypted_content")]
    calls = list(message.get("tool_calls") or ())
    ids = [str(call.get("id") or "") for call in calls]
    for place, call in enumerate(calls):
        attached = {
            name: call[name] for name in CALL_ATTACHMENT_FIELDS if isinstance(call.get(name), Mapping) and call[name]
        }
        where = {} if ids[place] and ids.count(ids[place]) == 1 else {"place": place}
        if attached:
            blocks.append({"type": "call", "id": ids[place], **where, **attached})
    return tuple(blocks)


def _has_type(block: Any) -> bool:
    found = block.get("type") if isinstance(block, Mapping) else None
    return isinstance(found, str) and found not in (CLAUDE, CLAUDE_EDITS)


def write_thoughts(blocks: Iterable[Block], form: ThoughtForm) -> dict[str, Any]:
    """Return the fields of an assistant's message that hold its thinking in this format; empty without thinking."""
    match form:
        case "signed":
            signed = [dict(block) for block in blocks if is_signed(block)]
            return {"thinking_blocks": signed} if signed else {}
        case "content":
            texts = [str(block["thinking"]) for block in blocks if block.get("thinking") and not is_signed(block)]
            return {"reasoning_content": "\n".join(texts)} if texts else {}
        case "items":
            items = [dict(block) for block in blocks if block.get("type") == "reasoning"]
            return {"reasoning_items": items} if items else {}
    return {}


def add_attachments(blocks: Iterable[Block], calls: list[dict[str, Any]]) -> None:
    """Add the attachments of their provider to serialized calls."""
    attached = {to_valid_name(str(block.get("id"))): block for block in blocks if block.get("type") == "call"}
    for call in calls:
        block = attached.get(call["id"], {})
        call |= {name: block[name] for name in CALL_ATTACHMENT_FIELDS if name in block}
