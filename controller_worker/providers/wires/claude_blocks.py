"""Claude's other blocks that must be sent back: those of server tools, and compactions.

Such a reply keeps all its blocks in order, together with its thinking blocks:

    {"type": "claude", "block": {…}} one block as Claude wrote it; for a call, only its position and extra fields
    {"type": "claude_edits", "applied_edits": […]} the provider's edits of the prompt; never sent back

Holds: a reply with only thinking, text and calls has none of these. They are sent to no other model family and over no
other protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controller_worker.providers.llm import ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from controller_worker.providers.wires.thoughts import CLAUDE, CLAUDE_EDITS, is_signed

Block = dict[str, Any]

THINKING = ("thinking", "redacted_thinking")
PAUSES = frozenset({"pause_turn", "compaction"})
"""Stop reasons of a paused turn. It continues with the same request plus the reply so far."""
_PLAIN = frozenset({*THINKING, "text", "tool_use"})
_OF_THE_CALL = frozenset({"name", "input"})


def collect_blocks(message: Mapping[str, Any], *, is_joined: bool = False) -> tuple[Block, ...]:
    """Return the blocks of a reply to store in its event.

    Args:
        is_joined: the reply came in several parts, so thinking may follow text.

    Raises:
        LookupError, TypeError, AttributeError: the message violates the protocol.
    """
    blocks = [dict(block) for block in message["content"]]
    if is_joined or any(block["type"] not in _PLAIN or block.get("citations") for block in blocks):
        found = [block if block["type"] in THINKING else _wrap(block) for block in blocks]
    else:
        found = [block for block in blocks if block["type"] in THINKING]
    edits = _list_edits(message)
    return (*found, {"type": CLAUDE_EDITS, "applied_edits": edits}) if edits else tuple(found)


def restore_blocks(message: Message, parts: Sequence[Block], calls: Sequence[Block], *, compacts: bool) -> list[Block]:
    """Return the stored blocks of an assistant message; thinking comes first if nothing else was stored.

    Args:
        parts: the content parts of the message. They are used if the stored text blocks no longer match its text.
        calls: the tool calls that have results.
        compacts: the request asks for compaction; otherwise compaction blocks are refused.
    """
    found = [dict(block) for block in message.thinking_blocks if is_signed(block) or _is_wrapped(block)]
    blocks = [block["block"] if _is_wrapped(block) else block for block in found]
    if not compacts:
        blocks = [block for block in blocks if block["type"] != "compaction"]
    if not any(map(_is_wrapped, found)):
        return [*blocks, *parts, *calls]
    said = "".join(part.text for part in message.content if isinstance(part, TextPart))
    written = "".join(str(block.get("text")) for block in blocks if block["type"] == "text")
    if said.strip() != written.strip():
        return [*(block for block in blocks if block["type"] in (*THINKING, "compaction")), *parts, *calls]
    waiting = {call["id"]: call for call in calls}
    again: list[Block] = []
    for block in blocks:
        if block["type"] == "tool_use":
            if block.get("id") in waiting:
                again.append(block | waiting.pop(block["id"]))
        elif block["type"] != "text" or str(block.get("text")).strip():
            again.append(dict(block))
    return [*again, *waiting.values()]


def is_paused(message: Any) -> bool:
    """Return whether a reply is a paused turn, which continues when it is sent back."""
    if not isinstance(message, Mapping) or message.get("stop_reason") not in PAUSES:
        return False
    blocks = message.get("content")
    return isinstance(blocks, list) and bool(blocks) and all(_may_continue(block) for block in blocks)


def continue_turn(request: ModelRequest, message: Mapping[str, Any]) -> ModelRequest:
    """Return the request that continues a paused turn. It uses the connection, never a batch.

    Raises:
        LookupError, TypeError, AttributeError: the message violates the protocol.
    """
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    content = (TextPart(text),) if text.strip() else ()
    so_far = Message("assistant", content, thinking_blocks=collect_blocks(message, is_joined=True))
    return replace(request, messages=(*request.messages, so_far), carry=None)


def join_parts(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the parts of a paused turn as one message with the stop reason of the last part."""
    if len(messages) == 1:
        return messages[0]
    return {
        **messages[-1],
        "content": [block for message in messages for block in message["content"]],
        "context_management": {"applied_edits": [edit for message in messages for edit in _list_edits(message)]},
    }


def _list_edits(message: Mapping[str, Any]) -> list[Any]:
    found = message.get("context_management")
    edits = found.get("applied_edits") if isinstance(found, Mapping) else None
    return [dict(edit) for edit in edits if isinstance(edit, Mapping)] if isinstance(edits, list) else []


def _may_continue(block: Any) -> bool:
    return isinstance(block, Mapping) and isinstance(block.get("type"), str) and block["type"] != "tool_use"


def _wrap(block: Block) -> Block:
    if block["type"] == "tool_use":
        block = {name: value for name, value in block.items() if name not in _OF_THE_CALL}
    return {"type": CLAUDE, "block": block}


def _is_wrapped(block: Mapping[str, Any]) -> bool:
    inner = block.get("block")
    return block.get("type") == CLAUDE and isinstance(inner, Mapping) and isinstance(inner.get("type"), str)


def list_compaction_counts(usage: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the usage of each compaction within a call. The call's own usage does not include it."""
    iterations = usage.get("iterations")
    for counts in iterations if isinstance(iterations, list) else ():
        if isinstance(counts, Mapping) and counts.get("type") == "compaction":
            yield counts
