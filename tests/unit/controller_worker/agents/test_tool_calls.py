"""Parsing of tool calls: every tool's arguments, and every mistake of a model."""

import itertools
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
EDITOR = "str_replace_editor"
PARSE_HINT = "Please write them again as one complete JSON object."


def made(*named: tuple[str, str]) -> tuple[ModelToolCall, ...]:
    """Calls of these names with these arguments; their ids are c1, c2, …"""
    return tuple(
        ModelToolCall(id=f"c{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(named, 1)
    )


def of(name: str, arguments: Any, *, text: str = "", tools: Sequence[ToolSpec] = TOOLS) -> Event:
    """Return the events of one call; arguments that are not text are written as JSON."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    events = parse_reply(ModelReply(id=7, content=text, tool_calls=made((name, raw))), tools)
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


@pytest.mark.parametrize("text", ["Which one?", ""])
def test_words_alone_wait_for_a_person(text: str) -> None:
    (event,) = parse_reply(ModelReply(id=7, content=text), TOOLS)
    assert event == MessageAction(content=text, source=EventSource.AGENT, wait_for_response=True)


def test_a_command() -> None:
    assert bash() == CmdRunAction(
        command="ls", tool_call_metadata=ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7)
    )


@pytest.mark.parametrize(
    ("argument", "values", "expected"),
    [
        ("is_input", ["true", True], True),
        ("is_input", ["false", False, "True", "TRUE", "yes", "1", 1, None, ["true"], {}], False),
        ("security_risk", ["LOW"], ActionSecurityRisk.LOW),
        ("security_risk", ["MEDIUM"], ActionSecurityRisk.MEDIUM),
        ("security_risk", ["HIGH"], ActionSecurityRisk.HIGH),
        ("security_risk", ["UNKNOWN", "low", "DANGEROUS", "", None, 1, ["LOW"], {"a": 1}], ActionSecurityRisk.UNKNOWN),
    ],
)
def test_loosely_typed_arguments_of_a_command(argument: str, values: list[object], expected: object) -> None:
    for value in values:
        assert getattr(bash(**{argument: value}), argument) is expected, value


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        *(({"timeout": value}, float(value)) for value in (5, 0.5, "30", "1e2", 10**17)),
        ({"timeout": None}, None),
        ({}, None),
        ({"colour": "red"}, None),
    ],
)
def test_a_timeout_blocks(arguments: dict[str, object], seconds: float | None) -> None:
    action = bash(**arguments)
    assert (action.command, action.timeout, action.blocking) == ("ls", seconds, seconds is not None)


EDIT = {"command": "create", "path": "/a"}
NO_STRING = "Input should be a valid string."


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("execute_bash", {"command": "ls", "timeout": "soon"}, "Invalid float passed to 'timeout' argument: 'soon'."),
        *(
            ("execute_bash", {"command": "ls", "timeout": value}, "'timeout' must be a positive number of seconds.")
            for value in (0, -1, "nan", "inf", "-inf", [5], {"seconds": 5})
        ),
        ("execute_bash", '{"command": "ls", "timeout": 1e999}', "'timeout' must be a positive number of seconds."),
        ("execute_bash", {}, 'Missing required argument "command" in tool call execute_bash'),
        ("execute_bash", "", 'Missing required argument "command" in tool call execute_bash'),
        *(
            ("execute_bash", {"command": value}, f"Invalid argument 'command' in tool call execute_bash: {NO_STRING}")
            for value in (5, None, ["ls"], {"a": 1}, True)
        ),
        *(
            (tool, {name: value}, f"Invalid argument '{name}' in tool call {tool}: {NO_STRING}")
            for tool, name in (("think", "thought"), ("finish", "message"))
            for value in ([], {}, ["x"])
        ),
        *(
            (EDITOR, EDIT | {name: ["x"]}, f"Invalid argument '{name}' in tool call {EDITOR}: {NO_STRING}")
            for name in ("file_text", "old_str", "new_str")
        ),
        (EDITOR, {"path": "/a"}, f'Missing required argument "command" in tool call {EDITOR}'),
        (EDITOR, {"command": "view"}, f'Missing required argument "path" in tool call {EDITOR}'),
        (
            EDITOR,
            EDIT | {"content": "x"},
            (
                "Unexpected argument 'content' in tool call str_replace_editor. Allowed arguments are: cell, cell_type, "
                "command, edits, file_text, insert_line, new_str, old_str, overwrite, path, replace_all, security_risk, "
                "view_range."
            ),
        ),
        (
            "grep",
            {"pattern": "x"},
            (
                'Tool grep is not registered. (arguments: {"pattern": "x"}). '
                "Please check the tool name and retry with an existing tool."
            ),
        ),
        (
            "execute_bash",
            '{"command": "' + "x" * MAX_ARGUMENTS_CHARS + '"}',
            "The arguments of execute_bash have more than 4,000,000 characters.",
        ),
        *(
            ("execute_bash", raw, f"The arguments of execute_bash must be a JSON object, not {kind}.")
            for raw, kind in (("[]", "list"), ('"ls"', "str"), ("5", "int"), ("null", "NoneType"), ("true", "bool"))
        ),
    ],
    ids=itertools.count(),
)
def test_bad_call_is_told_why(tool: str, arguments: Any, told: str) -> None:
    assert error_of(tool, arguments) == told


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        *(
            (
                EDITOR,
                {"command": "view", "path": "/a", "view_range": value},
                "Invalid argument 'view_range' in tool call",
            )
            for value in (5, "1,2", ["a"], [1.5], [[1]])
        ),
        (
            EDITOR,
            f'{{"command": "insert", "path": "/a", "insert_line": {10**30}}}',
            "Failed to parse tool call arguments: the integer 10000000000000000000… is too large.",
        ),
        ("", {}, "Tool  is not registered."),
        (
            "execute_bash",
            f'{{"command": {"9" * (sys.get_int_max_str_digits() + 1)}}}',
            "Failed to parse tool call arguments: ",
        ),
    ],
    ids=itertools.count(),
)
def test_worse_call_is_told_why_too(tool: str, arguments: Any, told: str) -> None:
    assert error_of(tool, arguments).startswith(told)


@pytest.mark.parametrize("name", ["is_input", "timeout", "is_background", "terminal", "control"])
def test_null_for_an_optional_argument_counts_as_omitted(name: str) -> None:
    assert bash(**{name: None}) == bash()


def test_a_thought_is_logged_at_once() -> None:
    action, observation = parse_reply(ModelReply(id=7, tool_calls=made(("think", '{"thought": "why?"}'))), TOOLS)
    metadata = ToolCallMetadata(function_name="think", tool_call_id="c1", reply_id=7)
    assert action == AgentThinkAction(thought="why?", tool_call_metadata=metadata)
    assert observation == AgentThinkObservation(
        content="Your thought has been logged.", source=EventSource.AGENT, cause=8, tool_call_metadata=metadata
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], ""), ([""], ""), ([None], ""), ([5], "5"), ([0.5], "0.5"), ([True], "true"), (["é"], "é")],
)
def test_finish_and_think_accept_omitted_and_loosely_typed_arguments(arguments: list[object], text: str) -> None:
    for tool, argument, field in (("think", "thought", "thought"), ("finish", "message", "final_thought")):
        event = of(tool, {"surplus": 1} | ({argument: arguments[0]} if arguments else {}))
        assert getattr(event, field) == text


def test_a_view_is_a_read() -> None:
    event = of("str_replace_editor", {"command": "view", "path": "/srv/a.py", "view_range": [2, -1], "old_str": "x"})
    assert isinstance(event, FileReadAction)
    assert (event.path, event.view_range, event.impl_source.value) == ("/srv/a.py", (2, -1), "oh_aci")


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


@pytest.mark.parametrize("depth", [100, 900, 990, 2_000, 100_000])
@pytest.mark.parametrize("argument", ["command", "timeout", "security_risk", "is_input", "other"])
def test_a_bomb_of_brackets_is_only_a_bad_call(depth: int, argument: str) -> None:
    raw = f'{{"command": "ls", "{argument}": ' + "[" * depth + "]" * depth + "}"
    event = of("execute_bash", raw)
    assert isinstance(event, ErrorObservation | CmdRunAction)
    assert len(codec.encode(event.wire())) < 10_000


def test_errors_show_a_thousand_characters_of_the_arguments() -> None:
    text = error_of("execute_bash", "x" * 5_000)
    assert "x" * 1_000 + ". " in text
    assert "x" * 1_001 not in text


@pytest.mark.parametrize(
    ("raw", "command"),
    [
        (r'{"command": "echo \ud83d"}', "echo \ufffd"),
        (r'{"command": "printf \u0000\u001b[31m"}', "printf \x00\x1b[31m"),
        ('{"command": "a", "command": "b"}', "b"),
    ],
    ids=["lone surrogate is replaced", "control characters are kept", "last of duplicate keys"],
)
def test_odd_text_of_a_command(raw: str, command: str) -> None:
    event = of("execute_bash", raw)
    assert isinstance(event, CmdRunAction)
    assert event.command == command
    assert codec.decode(codec.encode(event.wire()), 0) == event


def test_the_words_go_to_the_first_action() -> None:
    calls = made(("nope", "{}"), ("execute_bash", '{"command": "ls"}'), ("finish", '{"message": "m"}'))
    events = parse_reply(ModelReply(id=7, content="Let me look.", tool_calls=calls), TOOLS)
    assert [event.thought for event in events if isinstance(event, Action)] == ["Let me look.", ""]


def test_the_words_come_before_the_thought() -> None:
    event = of("think", {"thought": "why?"}, text="Let me think.")
    assert isinstance(event, AgentThinkAction)
    assert event.thought == "Let me think.\nwhy?"


def test_a_bad_call_leaves_its_neighbours_alone() -> None:
    calls = made(("execute_bash", '{"command": "ls"}'), ("execute_bash", "{"), ("think", '{"thought": "x"}'))
    events = parse_reply(ModelReply(id=7, tool_calls=calls), TOOLS)
    assert [event.kind for event in events] == ["action.run", "observation.error", "action.think", "observation.think"]
    assert events[3].cause == 10
    counts = [event.tool_call_metadata and event.tool_call_metadata.total_calls_in_response for event in events]
    assert counts == [3] * 4


def test_calls_beyond_the_limit_are_refused_one_by_one() -> None:
    calls = made(*(("execute_bash", f'{{"command": "{n}"}}') for n in range(130)))
    events = parse_reply(ModelReply(id=7, tool_calls=calls), TOOLS)
    commands = [event.command for event in events if isinstance(event, CmdRunAction)]
    assert commands == [str(n) for n in range(MAX_CALLS)]
    assert MAX_CALLS == 128
    refusals = [event for event in events if isinstance(event, ErrorObservation)]
    text = "Not carried out: a reply may hold 128 tool calls. Call it again."
    assert [refusal.content for refusal in refusals] == [text] * 2
    ids = [event.tool_call_metadata.tool_call_id for event in refusals if event.tool_call_metadata]
    assert ids == ["c129", "c130"]


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
    events = parse_reply(ModelReply(id=7, content=text, tool_calls=made(*calls)), TOOLS)
    answered = {event.tool_call_metadata.tool_call_id for event in events if event.tool_call_metadata}
    assert answered == {f"c{n}" for n in range(1, len(calls) + 1)}
    for event in events:
        assert codec.decode(codec.encode(codec.shorten(event.wire())[0]), 0) == event
