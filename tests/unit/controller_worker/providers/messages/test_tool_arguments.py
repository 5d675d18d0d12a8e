"""Arguments of tool calls as models write them: the cases of JSONTestSuite, and the result of each.

`y` must be accepted, `n` must be refused, `i` may be either; nothing may raise, and in each case the next request
that shows the call is strict JSON.
"""

import json
from typing import Any

import pytest

from broker.contract import codec
from broker.contract.actions import CmdRunAction
from broker.contract.events import ModelReply, ModelToolCall
from broker.contract.observations import ErrorObservation
from controller_worker.agents.tool_calls import parse_reply
from controller_worker.providers.llm import ModelRequest
from controller_worker.providers.messages.fn_call_text import read_calls, write_calls
from controller_worker.providers.messages.messages import (
    Message,
    TextPart,
    ToolCall,
    to_arguments_object,
    to_arguments_text,
)
from controller_worker.providers.wires.chat_wire import ChatWire
from controller_worker.providers.wires.messages_wire import MessagesWire

ACCEPTED = {
    "y_object": '{"command":"ls"}',
    "y_object_whitespace": ' \n\t{ "command" : "ls" }\r\n',
    "y_object_duplicated_key": '{"command":"x","command":"ls"}',
    "y_object_escaped_key": '{"\\u0063ommand":"ls"}',
    "y_object_extra": '{"command":"ls","a":[1,2.5e3,null,true,{"b":{}}]}',
    "y_string_escapes": '{"command":"\\"\\\\\\/\\b\\f\\n\\r\\t"}',
    "y_string_surrogate_pair": '{"command":"\\ud834\\udd1e"}',
    "y_string_nul": '{"command":"a\\u0000b"}',
    "y_string_unicode": '{"command":"\u2028\u2029\U0010ffff"}',
    "y_string_empty": '{"command":""}',
    "y_string_long": '{"command":"' + "x" * 100_000 + '"}',
    "y_number": '{"command":"ls","n":-0,"m":0.1e-5,"k":123456789012345678}',
}
REFUSED = {
    "n_empty_text": "{",
    "n_blank": " ",
    "n_array": '["ls"]',
    "n_string": '"ls"',
    "n_number": "1",
    "n_null": "null",
    "n_nothing": '{"command"}',
    "n_no_colon": '{"command" "ls"}',
    "n_two_colons": '{"command"::"ls"}',
    "n_trailing_comma": '{"command":"ls",}',
    "n_leading_comma": '{,"command":"ls"}',
    "n_two_commas": '{"command":"ls",,"a":1}',
    "n_unclosed_object": '{"command":"ls"',
    "n_unclosed_string": '{"command":"ls}',
    "n_unclosed_array": '{"command":"ls","a":[1}',
    "n_extra_close": '{"command":"ls"}}',
    "n_two_objects": '{"command":"ls"}{"command":"ls"}',
    "n_trailing_text": '{"command":"ls"} and so on',
    "n_comment": '{"command":"ls"/* list */}',
    "n_line_comment": '{"command":"ls"} // list',
    "n_single_quotes": "{'command':'ls'}",
    "n_no_quotes": "{command:ls}",
    "n_code_fence": '```json\n{"command":"ls"}\n```',
    "n_bom": '\ufeff{"command":"ls"}',
    "n_bad_escape": '{"command":"\\x"}',
    "n_short_escape": '{"command":"\\u00A"}',
    "n_raw_newline": '{"command":"a\nb"}',
    "n_raw_tab": '{"command":"a\tb"}',
    "n_raw_nul": '{"command":"a\x00b"}',
    "n_nan": '{"command":"ls","n":NaN}',
    "n_infinity": '{"command":"ls","n":-Infinity}',
    "n_plus": '{"command":"ls","n":+1}',
    "n_leading_zero": '{"command":"ls","n":012}',
    "n_no_fraction": '{"command":"ls","n":1.}',
    "n_no_digit": '{"command":"ls","n":.5}',
    "n_hex": '{"command":"ls","n":0x1F}',
    "n_bare_minus": '{"command":"ls","n":-}',
    "n_true_in_capitals": '{"command":"ls","n":True}',
    "n_deep_arrays": '{"command":' + "[" * 100_000,
    "n_deep_objects": '{"a":' * 100_000,
    "n_wrong_type": '{"command":["ls"]}',
    "n_missing": "{}",
}
EITHER = {
    "i_number_huge_exponent": '{"command":"ls","n":1e9999}',
    "i_number_tiny": '{"command":"ls","n":1e-9999}',
    "i_number_too_big_integer": '{"command":"ls","n":' + "9" * 50 + "}",
    "i_number_thousands_of_digits": '{"command":"ls","n":' + "9" * 5_000 + "}",
    "i_string_lone_surrogate": '{"command":"\\ud800"}',
    "i_string_inverted_surrogates": '{"command":"\\udd1e\\ud834"}',
    "i_key_lone_surrogate": '{"command":"ls","\\ud800":1}',
    "i_nested_500": '{"command":"ls","a":' + "[" * 500 + "]" * 500 + "}",
}
CASES = ACCEPTED | REFUSED | EITHER


def strict(text: str | bytes) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", CASES)
def test_call_is_run_or_refused_and_loggable(name: str) -> None:
    reply = ModelReply(id=7, tool_calls=(ModelToolCall(id="c", name="execute_bash", arguments=CASES[name]),))
    (event,) = parse_reply(reply, [CmdRunAction.tool_spec])
    if name in ACCEPTED:
        assert isinstance(event, CmdRunAction)
    elif name in REFUSED:
        assert isinstance(event, ErrorObservation)
        assert event.content
    else:
        assert isinstance(event, CmdRunAction | ErrorObservation)
    assert codec.decode(codec.encode(event.wire()), 0) == event


@pytest.mark.parametrize("name", CASES)
def test_the_next_request_is_strict_json(name: str) -> None:
    call = ToolCall("c", "execute_bash", CASES[name])
    messages = (
        Message("user", (TextPart("go"),)),
        Message("assistant", (), (call,)),
        Message("tool", (TextPart("done"),), tool_call_id="c", name="execute_bash"),
    )
    request = ModelRequest(messages, (), "c1", 1, "/w")
    chat = strict(ChatWire(cache_marks=False, thoughts="none").write_body({"model": "m"}, request))
    shown = strict(chat["messages"][1]["tool_calls"][0]["function"]["arguments"])
    native = strict(MessagesWire(caching_prompt=False).write_body({"model": "m"}, request))
    assert isinstance(native["messages"][1]["content"][0]["input"], dict)
    assert isinstance(shown, dict)
    if name in ACCEPTED:
        assert shown == json.loads(CASES[name])
    if name in REFUSED.keys() - {"n_wrong_type", "n_missing"}:
        assert list(shown) == ["malformed_arguments"]


@pytest.mark.parametrize("name", CASES)
def test_the_text_form_shows_it_too(name: str) -> None:
    written = write_calls("", [ToolCall("c", "execute_bash", CASES[name])], {})
    _, calls = read_calls(written, {}, ids="t")
    assert calls[0].name == "execute_bash"


def test_no_arguments_are_an_empty_object() -> None:
    assert (to_arguments_object(""), to_arguments_text("")) == ({}, "{}")


def test_arguments_are_shown_as_they_were_written() -> None:
    assert to_arguments_text(' {"a":  1.50}') == ' {"a":  1.50}'
