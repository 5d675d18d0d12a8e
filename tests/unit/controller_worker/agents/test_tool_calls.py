"""What tool calls mean: every tool's arguments, and everything a model can get wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import codec
from broker.contract.actions import AgentFinishAction, AgentThinkAction, CmdRunAction, MessageAction
from broker.contract.events import (
    Action,
    ActionSecurityRisk,
    Event,
    EventSource,
    ModelReply,
    ModelToolCall,
    ToolCallMetadata,
)
from broker.contract.file_events import FileEditAction, FileReadAction
from broker.contract.observations import AgentThinkObservation, ErrorObservation
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents.tool_calls import MAX_ARGUMENTS_CHARS, MAX_CALLS, parse_reply

TOOLS = tuple(kind.tool_spec for kind in (CmdRunAction, AgentThinkAction, AgentFinishAction, FileEditAction))
PARSE_HINT = "Please write them again as one complete JSON object."


def of(name: str, arguments: Any, *, text: str = "", tools: Sequence[ToolSpec] = TOOLS) -> Event:
    """What one call leads to; arguments that are not text are written as JSON."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    reply = ModelReply(id=7, content=text, tool_calls=(ModelToolCall(id="c1", name=name, arguments=raw),))
    events = parse_reply(reply, tools)
    assert len(events) == (2 if isinstance(events[0], AgentThinkAction) else 1)
    return events[0]


def error_of(name: str, arguments: Any, **options: Any) -> str:
    event = of(name, arguments, **options)
    assert isinstance(event, ErrorObservation)
    assert event.source is EventSource.AGENT
    assert event.cause is None
    assert event.tool_call_metadata == ToolCallMetadata(function_name=name, tool_call_id="c1", reply_id=7)
    return event.content


def bash(**arguments: Any) -> CmdRunAction:
    event = of("execute_bash", {"command": "ls"} | arguments)
    assert isinstance(event, CmdRunAction), event
    return event


# Without calls


def test_words_alone_wait_for_a_person() -> None:
    (event,) = parse_reply(ModelReply(id=7, content="Which one?"), TOOLS)
    assert event == MessageAction(content="Which one?", source=EventSource.AGENT, wait_for_response=True)


def test_no_words_and_no_calls_are_an_empty_message() -> None:
    (event,) = parse_reply(ModelReply(id=7), TOOLS)
    assert event == MessageAction(content="", source=EventSource.AGENT, wait_for_response=True)


# execute_bash


def test_a_command() -> None:
    assert bash() == CmdRunAction(
        command="ls",
        tool_call_metadata=ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7),
    )


@pytest.mark.parametrize(("value", "is_input"), [("true", True), (True, True), ("false", False), (False, False)])
def test_input(value: object, is_input: bool) -> None:
    assert bash(is_input=value).is_input is is_input


@pytest.mark.parametrize("value", ["True", "TRUE", "yes", "1", 1, None, ["true"], {}])
def test_nothing_else_is_input(value: object) -> None:
    assert bash(is_input=value).is_input is False


@pytest.mark.parametrize(("value", "seconds"), [(5, 5.0), (0.5, 0.5), ("30", 30.0), ("1e2", 100.0), (10**17, 1e17)])
def test_a_timeout_blocks(value: object, seconds: float) -> None:
    action = bash(timeout=value)
    assert (action.timeout, action.blocking) == (seconds, True)


def test_no_timeout_does_not_block() -> None:
    for action in (bash(), bash(timeout=None)):
        assert (action.timeout, action.blocking) == (None, False)


def test_a_timeout_that_is_no_number() -> None:
    text = error_of("execute_bash", {"command": "ls", "timeout": "soon"})
    assert text == "Invalid float passed to 'timeout' argument: 'soon'."


@pytest.mark.parametrize("value", [0, -1, "nan", "inf", "-inf", [5], {"seconds": 5}])
def test_a_timeout_that_is_no_time(value: object) -> None:
    text = error_of("execute_bash", {"command": "ls", "timeout": value})
    assert text == "'timeout' must be a positive number of seconds."


def test_a_timeout_beyond_all_floats() -> None:
    text = error_of("execute_bash", '{"command": "ls", "timeout": 1e999}')
    assert text == "'timeout' must be a positive number of seconds."


@pytest.mark.parametrize("name", ["LOW", "MEDIUM", "HIGH", "UNKNOWN"])
def test_the_models_own_estimate_of_the_risk(name: str) -> None:
    assert bash(security_risk=name).security_risk is ActionSecurityRisk[name]


@pytest.mark.parametrize("value", ["low", "DANGEROUS", "", None, 1, ["LOW"], {"a": 1}])
def test_an_estimate_that_is_none_is_unknown(value: object) -> None:
    assert bash(security_risk=value).security_risk is ActionSecurityRisk.UNKNOWN


@pytest.mark.parametrize("name", ["is_input", "timeout", "is_background", "terminal", "control"])
def test_null_for_an_optional_argument_counts_as_omitted(name: str) -> None:
    assert bash(**{name: None}) == bash()


def test_a_null_for_what_has_to_be_there_is_refused() -> None:
    assert "command" in error_of("execute_bash", {"command": None})


def test_a_missing_command() -> None:
    assert error_of("execute_bash", {}) == 'Missing required argument "command" in tool call execute_bash'


@pytest.mark.parametrize("value", [5, None, ["ls"], {"a": 1}, True])
def test_a_command_that_is_no_text(value: object) -> None:
    text = error_of("execute_bash", {"command": value})
    assert text == "Invalid argument 'command' in tool call execute_bash: Input should be a valid string."


def test_an_unknown_argument_of_a_command_is_ignored() -> None:
    assert bash(colour="red").command == "ls"


# think and finish


def test_a_thought_is_logged_at_once() -> None:
    reply = ModelReply(id=7, tool_calls=(ModelToolCall(id="c1", name="think", arguments='{"thought": "why?"}'),))
    action, observation = parse_reply(reply, TOOLS)
    metadata = ToolCallMetadata(function_name="think", tool_call_id="c1", reply_id=7)
    assert action == AgentThinkAction(thought="why?", tool_call_metadata=metadata)
    assert observation == AgentThinkObservation(
        content="Your thought has been logged.",
        source=EventSource.AGENT,
        cause=8,
        tool_call_metadata=metadata,
    )


def test_a_finish_has_a_final_thought_and_no_outputs() -> None:
    event = of("finish", {"message": "All tests pass."})
    assert isinstance(event, AgentFinishAction)
    assert (event.final_thought, event.thought, event.outputs) == ("All tests pass.", "", {})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], ""), ([""], ""), ([None], ""), ([5], "5"), ([0.5], "0.5"), ([True], "true"), (["é"], "é")],
)
def test_finish_and_think_accept_omitted_and_loosely_typed_arguments(arguments: list[object], text: str) -> None:
    for tool, argument, field in (("think", "thought", "thought"), ("finish", "message", "final_thought")):
        event = of(tool, {"surplus": 1} | ({argument: arguments[0]} if arguments else {}))
        assert getattr(event, field) == text


@pytest.mark.parametrize(("tool", "argument"), [("think", "thought"), ("finish", "message")])
@pytest.mark.parametrize("value", [[], {}, ["x"]])
def test_texts_that_are_none(tool: str, argument: str, value: object) -> None:
    text = error_of(tool, {argument: value})
    assert text == f"Invalid argument '{argument}' in tool call {tool}: Input should be a valid string."


# str_replace_editor


def test_a_view_is_a_read() -> None:
    event = of("str_replace_editor", {"command": "view", "path": "/srv/a.py", "view_range": [2, -1], "old_str": "x"})
    assert isinstance(event, FileReadAction)
    assert (event.path, event.view_range, event.impl_source.value) == ("/srv/a.py", (2, -1), "oh_aci")


@pytest.mark.parametrize("value", [5, "1,2", ["a"], [1.5], [[1]]])
def test_a_view_range_that_is_none(value: object) -> None:
    text = error_of("str_replace_editor", {"command": "view", "path": "/a", "view_range": value})
    assert text.startswith("Invalid argument 'view_range' in tool call str_replace_editor: Input should be a valid ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": "create", "file_text": "x = 1\n"}, {"file_text": "x = 1\n"}),
        ({"command": "str_replace", "old_str": "a", "new_str": "b"}, {"old_str": "a", "new_str": "b"}),
        ({"command": "insert", "insert_line": 3, "new_str": "b"}, {"insert_line": 3, "new_str": "b"}),
        ({"command": "undo_edit", "view_range": [1, 2], "security_risk": "LOW"}, {}),
        ({"command": "no_such_command"}, {}),
    ],
)
def test_other_commands_are_edits(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    event = of("str_replace_editor", {"path": "/srv/a.py"} | arguments)
    assert isinstance(event, FileEditAction)
    assert (event.command, event.path, event.impl_source.value) == (arguments["command"], "/srv/a.py", "oh_aci")
    nothing = {"file_text": None, "old_str": None, "new_str": None, "insert_line": None}
    assert {name: getattr(event, name) for name in nothing} == nothing | expected


def test_an_argument_the_editor_does_not_have() -> None:
    text = error_of("str_replace_editor", {"command": "create", "path": "/a", "content": "x"})
    assert text == (
        "Unexpected argument 'content' in tool call str_replace_editor. "
        "Allowed arguments are: cell, cell_type, command, edits, file_text, insert_line, new_str, old_str, overwrite, "
        "path, replace_all, security_risk, view_range."
    )


def test_missing_arguments_of_the_editor() -> None:
    tool = "str_replace_editor"
    assert error_of(tool, {"path": "/a"}) == f'Missing required argument "command" in tool call {tool}'
    assert error_of(tool, {"command": "view"}) == f'Missing required argument "path" in tool call {tool}'


@pytest.mark.parametrize("name", ["file_text", "old_str", "new_str"])
def test_texts_of_the_editor(name: str) -> None:
    text = error_of("str_replace_editor", {"command": "create", "path": "/a", name: ["x"]})
    assert text == f"Invalid argument '{name}' in tool call str_replace_editor: Input should be a valid string."


def test_an_integer_that_the_log_cannot_hold() -> None:
    text = error_of("str_replace_editor", f'{{"command": "insert", "path": "/a", "insert_line": {10**30}}}')
    assert text.startswith("Failed to parse tool call arguments: the integer 10000000000000000000… is too large.")


# Names


def test_an_unknown_tool() -> None:
    assert error_of("grep", {"pattern": "x"}) == (
        'Tool grep is not registered. (arguments: {"pattern": "x"}). '
        "Please check the tool name and retry with an existing tool."
    )


def test_a_tool_that_is_switched_off_is_unknown() -> None:
    text = error_of("think", {"thought": "x"}, tools=[tool for tool in TOOLS if tool.name != "think"])
    assert text.startswith("Tool think is not registered.")


def test_an_empty_name() -> None:
    assert error_of("", {}).startswith("Tool  is not registered.")


# JSON


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ('{"command": ', "Expecting value: line 1 column 13 (char 12)"),
        ('{"command": "ls"} trailing', "Extra data: line 1 column 19 (char 18)"),
        ("   ", "Expecting value: line 1 column 4 (char 3)"),
        ('{"command": "ls", "timeout": NaN}', "NaN is not JSON"),
        ('{"command": "ls", "timeout": -Infinity}', "-Infinity is not JSON"),
        ("{'command': 'ls'}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"command": "a\nb"}', "Invalid control character at: line 1 column 15 (char 14)"),
        ("\ufeff{}", "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    ],
)
def test_broken_json(raw: str, complaint: str) -> None:
    text = error_of("execute_bash", raw)
    assert text == f"Failed to parse tool call arguments: {complaint}. Arguments: {raw}. {PARSE_HINT}"


@pytest.mark.parametrize(
    ("raw", "kind"), [("[]", "list"), ('"ls"', "str"), ("5", "int"), ("null", "NoneType"), ("true", "bool")]
)
def test_json_that_is_no_object(raw: str, kind: str) -> None:
    assert error_of("execute_bash", raw) == f"The arguments of execute_bash must be a JSON object, not {kind}."


def test_no_arguments_are_an_empty_object() -> None:
    assert error_of("execute_bash", "") == 'Missing required argument "command" in tool call execute_bash'


def test_of_duplicate_keys_the_last_counts() -> None:
    event = of("execute_bash", '{"command": "a", "command": "b"}')
    assert isinstance(event, CmdRunAction)
    assert event.command == "b"


@pytest.mark.parametrize("depth", [100, 900, 990, 2_000, 100_000])
@pytest.mark.parametrize("argument", ["command", "timeout", "security_risk", "is_input", "other"])
def test_a_bomb_of_brackets_is_only_a_bad_call(depth: int, argument: str) -> None:
    raw = f'{{"command": "ls", "{argument}": ' + "[" * depth + "]" * depth + "}"
    event = of("execute_bash", raw)
    assert isinstance(event, ErrorObservation | CmdRunAction)
    assert len(codec.encode(event.wire())) < 10_000


def test_an_endless_integer_is_only_a_bad_call() -> None:
    digits = "9" * (sys.get_int_max_str_digits() + 1)
    assert error_of("execute_bash", f'{{"command": {digits}}}').startswith("Failed to parse tool call arguments: ")


def test_arguments_without_measure_are_not_parsed() -> None:
    raw = '{"command": "' + "x" * MAX_ARGUMENTS_CHARS + '"}'
    assert error_of("execute_bash", raw) == "The arguments of execute_bash have more than 4,000,000 characters."


def test_errors_show_a_thousand_characters_of_the_arguments() -> None:
    text = error_of("execute_bash", "x" * 5_000)
    assert "x" * 1_000 + ". " in text
    assert "x" * 1_001 not in text


def test_lone_surrogates_are_replaced_before_anything_is_made_of_them() -> None:
    event = of("execute_bash", r'{"command": "echo \ud83d"}')
    assert isinstance(event, CmdRunAction)
    assert event.command == "echo \ufffd"
    assert codec.decode(codec.encode(event.wire()), 0) == event


def test_control_characters_and_nul_are_kept() -> None:
    event = of("execute_bash", {"command": "printf '\x00\x1b[31m'"})
    assert isinstance(event, CmdRunAction)
    assert event.command == "printf '\x00\x1b[31m'"


# Several calls


def test_the_words_go_to_the_first_action() -> None:
    calls = (
        ModelToolCall(id="a", name="nope", arguments="{}"),
        ModelToolCall(id="b", name="execute_bash", arguments='{"command": "ls"}'),
        ModelToolCall(id="c", name="finish", arguments='{"message": "m"}'),
    )
    events = parse_reply(ModelReply(id=7, content="Let me look.", tool_calls=calls), TOOLS)
    assert [event.thought for event in events if isinstance(event, Action)] == ["Let me look.", ""]


def test_the_words_come_before_the_thought() -> None:
    event = of("think", {"thought": "why?"}, text="Let me think.")
    assert isinstance(event, AgentThinkAction)
    assert event.thought == "Let me think.\nwhy?"


def test_a_bad_call_leaves_its_neighbours_alone() -> None:
    calls = (
        ModelToolCall(id="a", name="execute_bash", arguments='{"command": "ls"}'),
        ModelToolCall(id="b", name="execute_bash", arguments="{"),
        ModelToolCall(id="c", name="think", arguments='{"thought": "x"}'),
    )
    events = parse_reply(ModelReply(id=7, tool_calls=calls), TOOLS)
    assert [event.kind for event in events] == [
        "action.run",
        "observation.error",
        "action.think",
        "observation.think",
    ]
    assert events[3].cause == 10
    assert [event.tool_call_metadata and event.tool_call_metadata.total_calls_in_response for event in events] == [
        3
    ] * 4


def test_fifty_calls() -> None:
    calls = tuple(ModelToolCall(id=f"c{n}", name="execute_bash", arguments=f'{{"command": "{n}"}}') for n in range(50))
    events = parse_reply(ModelReply(id=7, tool_calls=calls), TOOLS)
    assert [event.command for event in events if isinstance(event, CmdRunAction)] == [str(n) for n in range(50)]


def test_calls_beyond_the_limit_are_refused_one_by_one() -> None:
    calls = tuple(ModelToolCall(id=f"c{n}", name="execute_bash", arguments='{"command": "x"}') for n in range(130))
    events = parse_reply(ModelReply(id=7, tool_calls=calls), TOOLS)
    assert sum(isinstance(event, CmdRunAction) for event in events) == MAX_CALLS == 128
    refusals = [event for event in events if isinstance(event, ErrorObservation)]
    assert [refusal.content for refusal in refusals] == [
        "Not carried out: a reply may hold 128 tool calls. Call it again."
    ] * 2
    assert [event.tool_call_metadata.tool_call_id for event in refusals if event.tool_call_metadata] == ["c128", "c129"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*(tool.name for tool in TOOLS), "nope", ""]) | st.text(max_size=5)
objects = st.dictionaries(
    st.sampled_from(
        [
            *("command", "path", "timeout", "is_input", "security_risk", "thought", "message"),
            *("file_text", "old_str", "new_str", "insert_line", "view_range", "x"),
        ]
    ),
    json_values | st.sampled_from(["view", "create", "insert", "ls"]),
)


@given(st.lists(st.tuples(names, objects.map(json.dumps) | st.text()), min_size=1, max_size=4), st.text())
def test_nothing_a_model_writes_raises_and_everything_can_be_logged(calls: list[tuple[str, str]], text: str) -> None:
    reply = ModelReply(
        id=7,
        content=text,
        tool_calls=tuple(
            ModelToolCall(id=f"c{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(calls)
        ),
    )
    events = parse_reply(reply, TOOLS)
    answered = {event.tool_call_metadata.tool_call_id for event in events if event.tool_call_metadata}
    assert answered == {f"c{n}" for n in range(len(calls))}
    for event in events:
        assert codec.decode(codec.encode(codec.shorten(event.wire())[0]), 0) == event
