"""The text of replies in OpenHands' transient events, from pieces and recorded replies."""

from __future__ import annotations

from typing import Any

from broker.contract import ModelReply
from broker.testing.manual_clock import ManualClock
from deckhands.server.openhands.reply_deltas import ReplyDeltas


def make() -> ReplyDeltas:
    return ReplyDeltas(ManualClock())


def piece(text: str, at: int, *, call: str = "1.1", kind: str = "text") -> dict[str, Any]:
    return {"call": call, "kind": kind, "text": text, "at": at}


def texts(events: list[dict[str, Any]]) -> list[str | None]:
    assert all(event["kind"] == "StreamingDeltaEvent" and event["source"] == "agent" for event in events)
    return [event.get("content", event.get("reasoning_content")) for event in events]


def test_pieces_and_the_rest_of_their_reply_come_once() -> None:
    deltas = make()
    assert texts(deltas.add_piece(piece("One ", 0)) + deltas.add_piece(piece("two", 4))) == ["One ", "two"]
    assert texts(deltas.add_reply(ModelReply(content="One two three", iteration=1))) == [" three"]
    assert deltas.add_piece(piece(" three", 7)) == [], "it is too late"
    assert texts(deltas.add_piece(piece("Next", 0, call="2.1"))) == ["Next"]


def test_text_after_a_lost_piece_comes_with_its_reply() -> None:
    deltas = make()
    assert texts(deltas.add_piece(piece("One ", 0))) == ["One "]
    assert deltas.add_piece(piece("three", 8)) == []
    assert texts(deltas.add_reply(ModelReply(content="One two three", iteration=1))) == ["two three"]


def test_repeated_call_sends_its_text_again() -> None:
    deltas = make()
    assert texts(deltas.add_piece(piece("Wrong", 0))) == ["Wrong"]
    assert texts(deltas.add_piece(piece("Right", 0, call="1.2"))) == ["Right"]
    assert deltas.add_reply(ModelReply(content="Right", iteration=1)) == []


def test_thinking_has_its_own_field_and_calls_have_none() -> None:
    deltas = make()
    (thought,) = deltas.add_piece(piece("Hm.", 0, kind="thinking"))
    assert (thought["reasoning_content"], "content" in thought) == ("Hm.", False)
    assert deltas.add_piece(piece('finish{"message":', 3, kind="call")) == []
    assert texts(deltas.add_reply(ModelReply(content="Text", iteration=1))) == ["Text"]


def test_reply_of_a_condenser_is_not_text_of_the_agent() -> None:
    assert make().add_reply(ModelReply(content="A summary", service="condenser")) == []
