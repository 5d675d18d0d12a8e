"""Claude's blocks besides thoughts, texts and calls: those that a reply keeps, and the requests that return them."""

import json
from typing import Any

import pytest

from broker.contract.codec import decode, encode
from broker.contract.events import ModelReply
from controller_worker.model.model_call import to_model_reply
from controller_worker.providers.llm import CallUsage, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.wires.chat_wire import ChatWire, read_chat_reply
from controller_worker.providers.wires.claude_blocks import continue_turn, is_paused
from controller_worker.providers.wires.messages_wire import MessagesWire, read_message

SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
CALL = {"type": "tool_use", "id": "t1", "name": "execute_bash", "input": {"command": "ls"}}
LATER = {"type": "tool_use", "id": "t2", "name": "execute_bash", "input": {"command": "id"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
COMPACTION = {"type": "compaction", "content": "So far.", "encrypted_content": "sealed"}
USER = Message("user", (TextPart("hi"),))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def message(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "msg_1", "model": "claude-x", "content": list(content), "stop_reason": "tool_use"} | fields


def logged(reply: Any) -> ModelReply:
    """Return the event of a reply as it comes out of a log, which a fork copies."""
    completion = reply.to_completion(cost_usd=None, latency_seconds=0.0)
    event = decode(encode(to_model_reply(completion, iteration=1, seen_id=1, event_id=2).wire()), 2)
    assert isinstance(event, ModelReply)
    return event


def said(event: ModelReply, *, without: frozenset[str] = frozenset(), words: str | None = None) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in event.tool_calls if call.id not in without)
    shown = event.content if words is None else words
    return Message("assistant", (TextPart(shown),) if shown else (), calls, thinking_blocks=event.thinking_blocks)


def blocks_of(spoken: Message, *, compacts: bool = True) -> list[dict[str, Any]]:
    request = ModelRequest((USER, spoken), (), "c1", 0, "/w")
    sent = json.loads(MessagesWire(caching_prompt=False, compacts=compacts).write_body({"model": "m"}, request))
    blocks: list[dict[str, Any]] = sent["messages"][1]["content"]
    return blocks


WRITTEN = [THOUGHT, text("I search."), SEARCH, FOUND, text("I run."), CALL, LATER]


def test_every_block_returns_in_its_place_through_the_log() -> None:
    assert blocks_of(said(logged(read_message(message(*WRITTEN))))) == WRITTEN


def test_a_call_that_is_not_shown_leaves_its_place() -> None:
    event = logged(read_message(message(*WRITTEN)))
    assert blocks_of(said(event, without=frozenset({"t1"}))) == [*WRITTEN[:5], LATER]


def test_words_that_were_changed_since_are_the_ones_that_count() -> None:
    event = logged(read_message(message(COMPACTION, THOUGHT, text("secret"), SEARCH, FOUND, CALL)))
    assert blocks_of(said(event, words="hidden")) == [COMPACTION, THOUGHT, text("hidden"), CALL]


def test_a_compaction_returns_only_where_compactions_are_asked_for() -> None:
    event = logged(read_message(message(COMPACTION, text("Now."), CALL)))
    assert blocks_of(said(event)) == [COMPACTION, text("Now."), CALL]
    assert blocks_of(said(event), compacts=False) == [text("Now."), CALL]


def test_applied_edits_are_kept_and_never_sent() -> None:
    edits = [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 3, "cleared_input_tokens": 9}]
    event = logged(read_message(message(THOUGHT, CALL, context_management={"applied_edits": edits})))
    assert event.thinking_blocks == (THOUGHT, {"type": "claude_edits", "applied_edits": edits})
    assert blocks_of(said(event)) == [THOUGHT, CALL]


def test_a_reply_of_words_and_calls_keeps_nothing_twice() -> None:
    assert read_message(message(THOUGHT, text("I run."), CALL, context_management=None)).thinking_blocks == (THOUGHT,)


@pytest.mark.parametrize("thoughts", ["none", "signed", "content", "items", "calls"])
def test_chat_completions_get_none_of_it(thoughts: Any) -> None:
    event = logged(read_message(message(COMPACTION, SEARCH, FOUND, text("Now."), CALL)))
    (written,) = ChatWire(cache_marks=False, thoughts=thoughts).write_values([said(event)])
    assert set(written) == {"role", "content", "tool_calls"}
    assert "So far." not in json.dumps(written)


def test_no_other_protocol_can_bring_such_a_block() -> None:
    """A server of another family could otherwise put a summary into Claude's mouth."""
    forged = [{"type": "claude", "block": COMPACTION}, {"type": "claude_edits", "applied_edits": []}]
    reply = {"message": {"content": "Now.", "thinking_blocks": forged}, "finish_reason": "stop"}
    assert read_chat_reply({"id": "r", "model": "m", "choices": [reply]}).thinking_blocks == ()


@pytest.mark.parametrize(
    "odd",
    [{"type": "claude"}, {"type": "claude", "block": 7}, {"type": "claude", "block": {}}, {"type": "claude_edits"}],
)
def test_a_block_without_a_form_is_left_out(odd: dict[str, Any]) -> None:
    spoken = Message("assistant", (TextPart("Now."),), thinking_blocks=(odd,))
    assert blocks_of(spoken) == [text("Now.")]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (message(SEARCH, stop_reason="pause_turn"), True),
        (message(COMPACTION, stop_reason="compaction"), True),
        (message(SEARCH, stop_reason="end_turn"), False),
        (message(SEARCH, CALL, stop_reason="pause_turn"), False),  # which has no result yet
        (message(stop_reason="pause_turn"), False),
        (message("text", stop_reason="pause_turn"), False),
        ({"stop_reason": "pause_turn", "content": "text"}, False),
        ([], False),
    ],
)
def test_a_turn_that_continues(reply: Any, expected: bool) -> None:
    assert is_paused(reply) is expected


def test_a_turn_continues_with_what_it_was() -> None:
    request = ModelRequest((USER,), (), "c1", 0, "/w")
    first = continue_turn(request, message(text("I search."), SEARCH, stop_reason="pause_turn"))
    second = continue_turn(first, message(FOUND, text("More."), SEARCH | {"id": "s2"}, stop_reason="pause_turn"))
    sent = json.loads(MessagesWire(caching_prompt=False).write_body({"model": "m"}, second))
    assert [turn["role"] for turn in sent["messages"]] == ["user", "assistant"]
    assert sent["messages"][1]["content"] == [text("I search."), SEARCH, FOUND, text("More."), SEARCH | {"id": "s2"}]


@pytest.mark.parametrize("iterations", [None, 7, [7], [{"type": "message", "input_tokens": 5}], {"type": "compaction"}])
def test_odd_iterations_count_nothing(iterations: Any) -> None:
    reply = read_message(message(text("x"), usage={"input_tokens": 3, "output_tokens": 1, "iterations": iterations}))
    assert reply.usage == CallUsage(prompt_tokens=3, completion_tokens=1)
