"""Names and ids of tool calls in a form that every provider takes back."""

import re

from hypothesis import given
from hypothesis import strategies as st

from controller_worker.providers.messages.messages import (
    Message,
    TextPart,
    ToolCall,
    make_ids_distinct,
    to_valid_name,
)

PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")
SAID = Message("assistant", (TextPart("hm"),))


def turn(*ids: str) -> tuple[Message, ...]:
    calls = tuple(ToolCall(call_id, "ls", "{}") for call_id in ids)
    return (Message("assistant", tool_calls=calls), *(Message("tool", tool_call_id=call_id) for call_id in ids))


@given(st.text(), st.text())
def test_every_name_fits_and_different_ones_stay_different(one: str, other: str) -> None:
    assert PATTERN.fullmatch(to_valid_name(one))
    assert (to_valid_name(one) == to_valid_name(other)) == (one == other)


@given(st.from_regex(PATTERN, fullmatch=True))
def test_valid_names_stay(name: str) -> None:
    assert to_valid_name(name) == name


def test_distinct_ids_leave_the_messages_as_they_are() -> None:
    messages = (*turn("a", "b"), SAID, *turn("c"))
    assert make_ids_distinct(messages) is messages


def test_repeated_id_is_replaced_together_with_its_result() -> None:
    messages = (*turn("a", "b"), SAID, *turn("a"), *turn("a_2"), *turn("a", "c"))
    distinct = make_ids_distinct(messages)
    called = [[call.id for call in message.tool_calls] for message in distinct if message.tool_calls]
    answered = [message.tool_call_id for message in distinct if message.role == "tool"]
    assert called == [["a", "b"], ["a_2"], ["a_2_2"], ["a_3", "c"]]
    assert answered == [call_id for ids in called for call_id in ids]
    assert distinct[:4] == [*turn("a", "b"), SAID]
