"""Tool calls as text: every list of calls survives, and no partial call runs."""

import json
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.tool_specs import ToolSpec
from controller_worker.providers.messages.fn_call_text import read_calls, write_calls
from controller_worker.providers.messages.messages import ToolCall


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> ToolSpec:
    return ToolSpec(name, "", {"type": "object", "properties": properties, "required": list(required)})


TEXT = {"type": "string"}
TOOLS = {
    each.name: each
    for each in (
        tool("execute_bash", ("command",), command=TEXT, is_input={"type": "string", "enum": ["true", "false"]}),
        tool("view", ("path",), path=TEXT, view_range={"type": "array", "items": {"type": "integer"}}),
        tool("insert", line={"type": "integer"}, share={"type": "number"}, is_quiet={"type": "boolean"}),
        tool("ask", options={"type": "object"}, limit={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        tool("think", thought={}, mood={"type": ["string", "number"]}, level={"enum": ["1", "2", 3]}),
        tool("finish"),
    )
}


def read(text: str, *, is_cut: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """The text, and each call's name with its arguments, or with its problem."""
    content, calls = read_calls(text, TOOLS, ids="t_", is_cut=is_cut)
    return content, [(call.name, call.problem or json.loads(call.arguments)) for call in calls]


def problem(text: str, *, is_cut: bool = False) -> str:
    _, [(_, found), *_] = read(text, is_cut=is_cut)
    assert isinstance(found, str), found
    return found


# Round trip

TAGS = st.sampled_from(
    ["<function=", "</function>", "</function", "<parameter=a>", "</parameter>", "<\\/parameter>", "<", "\n", "\\", '"']
)
PIECES = st.lists(st.one_of(TAGS, st.text(st.characters(exclude_categories=("Cs",)), max_size=8)), max_size=6)
TEXTS = PIECES.map("".join)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


def call(name: str, required: dict[str, Any], **optional: Any) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(required, optional=optional))


CALLS = st.lists(
    st.one_of(
        call("execute_bash", {"command": TEXTS}, is_input=st.sampled_from(["true", "false"])),
        call("view", {"path": TEXTS}, view_range=st.lists(st.integers())),
        call("insert", {}, line=st.integers(), share=NUMBERS, is_quiet=st.booleans()),
        call("ask", {}, options=st.dictionaries(TEXTS, JSON, max_size=3), limit=st.one_of(st.none(), st.integers())),
        call("think", {}, thought=JSON, mood=st.one_of(TEXTS, NUMBERS), level=st.sampled_from(["1", "2", 3])),
        call("finish", {}),
    ),
    min_size=1,
    max_size=5,
)


@given(TEXTS, CALLS)
def test_any_list_of_calls_survives_the_round_trip(text: str, calls: list[tuple[str, Any]]) -> None:
    written = write_calls(text, [ToolCall("", name, json.dumps(arguments)) for name, arguments in calls], TOOLS)
    assert read(written) == (text.strip(), calls)


@given(TEXTS, CALLS)
def test_the_stop_word_takes_nothing_away(text: str, calls: list[tuple[str, Any]]) -> None:
    written = write_calls(text, [ToolCall("", name, json.dumps(arguments)) for name, arguments in calls[:1]], TOOLS)
    assert read(written.removesuffix("</function>")) == (text.strip(), calls[:1])


@given(st.text(max_size=50))
def test_a_text_without_calls_survives(text: str) -> None:
    assert read(write_calls(text, (), TOOLS)) == (text, [])


@given(CALLS, st.data())
def test_call_cut_off_anywhere_is_never_run(calls: list[tuple[str, Any]], data: st.DataObject) -> None:
    name, arguments = calls[0]
    written = write_calls("", [ToolCall("", name, json.dumps(arguments))], TOOLS)
    end = data.draw(st.integers(len("<function="), len(written) - 1))
    assert "cut off" in problem(written[:end], is_cut=True)


@given(TEXTS)
def test_nothing_that_a_model_writes_raises(text: str) -> None:
    for begin in ("", "<function=execute_bash>", "<function=view>\n<parameter=path>"):
        read(begin + text)


# The form


def test_the_form() -> None:
    calls = [
        ToolCall("a", "execute_bash", '{"command": "ls", "is_input": "false"}'),
        ToolCall("b", "view", '{"path": "a\\nb", "view_range": [1, 2]}'),
    ]
    assert write_calls(" I look.", calls, TOOLS) == (
        "I look.\n\n"
        "<function=execute_bash>\n<parameter=command>ls</parameter>\n<parameter=is_input>false</parameter>\n</function>\n\n"
        "<function=view>\n<parameter=path>\na\nb\n</parameter>\n<parameter=view_range>[1, 2]</parameter>\n</function>"
    )


def test_ids_are_numbered() -> None:
    _, calls = read_calls("<function=finish>\n</function>\n<function=finish>", TOOLS, ids="toolu_07_")
    assert [each.id for each in calls] == ["toolu_07_01", "toolu_07_02"]


LS = ("execute_bash", {"command": "ls"})


IMAGINED = """<function=execute_bash>
<parameter=command>ls</parameter>
</function>
EXECUTION RESULT of [execute_bash]:
a.txt
<function=finish>
</function>"""


@pytest.mark.parametrize(
    "text",
    [
        "<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>",
        "<function=execute_bash><parameter=command>ls</parameter></function>",
        "<function=execute_bash>\n<parameter=command>\nls\n</parameter>\n</function>",
        "<function=execute_bash>\n<parameter=command>ls</parameter>\n</",
        "<function=execute_bash>\n<parameter=command>ls</parameter>\n",
        "<function=execute_bash>\n<parameter=command=ls</parameter>\n</function>",
        "<tool_call>\n<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>\n</tool_call>",
        '<function=execute_bash>{"command": "ls"}</function>',
        IMAGINED,
    ],
    ids=[
        "as told", "no line breaks", "block", "cut by the stop word", "nothing behind", "name=value", "wrapped",
        "JSON", "imagined results",
    ],
)  # fmt: skip
def test_what_models_make_of_the_form(text: str) -> None:
    assert read("I look.\n" + text) == ("I look.", [LS])


WHOLE = "<parameter=command>ls</parameter>"


@pytest.mark.parametrize(
    "inside",
    [
        f"\nI list the files:\n{WHOLE}\n",
        f"I list the files: {WHOLE}\n",
        f"\n{WHOLE}\nThat is all.\n",
        f"\n{WHOLE} and nothing else",
        f"\n{WHOLE}</parameter>\n",
        f"\n{WHOLE}\n</parameter>\n</parameter>\n",
        f"\n{WHOLE}</parameter> That is all.\n",
        f"\n</parameter>\n{WHOLE}\n",
        f"\nSo </parameter> then {WHOLE}\n",
        '{"command": "ls"} I hope.',
    ],
)
@pytest.mark.parametrize("end", ["</function>", "", "</"])
def test_text_around_whole_parameters_is_no_part_of_a_call(inside: str, end: str) -> None:
    assert read(f"<function=execute_bash>{inside}{end}") == ("", [LS])
    assert "cut off" in problem(f"<function=execute_bash>{inside}", is_cut=True)


def test_words_between_parameters() -> None:
    text = f"<function=execute_bash>\nRun\n{WHOLE}\nnot as input:\n<parameter=is_input>false</parameter>\n</function>"
    assert read(text) == ("", [("execute_bash", {"command": "ls", "is_input": "false"})])


@pytest.mark.parametrize(
    "value",
    [
        "<parameter name='a'>\n</parameter>",
        "a</parameter>\nb\n</parameter>",
        "a</parameter> b </parameter> c",
        "a</parameter>b</parameter>",
    ],
)
def test_possible_rest_of_a_value_is_never_dropped(value: str) -> None:
    text = f"<function=execute_bash>\n<parameter=command>{value}\n</parameter>\n</function>"
    assert problem(text).startswith("Malformed call of function 'execute_bash'")


def test_a_value_may_mention_the_tag_of_a_call() -> None:
    text = "<function=think>\n<parameter=thought>Next I use <function=view>, then look.</parameter>\n</function>"
    assert read(text) == ("", [("think", {"thought": "Next I use <function=view>, then look."})])


@pytest.mark.parametrize(
    "prose",
    [
        "I would use <function=execute_bash> to run it.",
        "Write `<function=execute_bash>` first.",
        "A call begins with <function= and ends with </function>.",
        "A call begins with `<function=`",
        "A call begins with <function=NAME> and holds <parameter=P>VALUE</parameter>.",
        "It ends in <function=execute_bash>",
        "The tags <function=a>, <function=b>, <function=c> are the same.",
        "Use <function=execute_bash>\nand wait.",
        "<function=execute_bash> is how I would begin.",
        "The model said <function=",
    ],
)
def test_prose_that_mentions_a_call_is_prose(prose: str) -> None:
    assert read(prose) == (prose, [])
    call_text = f"<function=execute_bash>\n{WHOLE}\n</function>"
    assert read(f"{prose}\n{call_text}") == (prose, [LS])
    assert read(f"{call_text}\n{prose}") == ("", [LS])


@pytest.mark.parametrize(
    "text",
    [
        "<function=execute_bash>\nls\n</function>",
        "I look.\n<function=execute_bash>\nls -la\n",
        "I look. <function=execute_bash></function>",
    ],
)
def test_a_call_without_its_parameter_is_a_failed_call(text: str) -> None:
    assert problem(text) == "Missing required parameters for function 'execute_bash': {'command'}"


def test_a_tool_without_parameters_needs_no_end() -> None:
    assert read("I am done: <function=finish>") == ("I am done:", [("finish", {})])


def test_a_long_text_of_mentions_is_read_once() -> None:
    began = process_time()
    for end in ("\n", " "):
        assert read(f"<function=execute_bash> and so on{end}" * 50_000)[1] == []
    read("<function=execute_bash>" + " " * 200_000 + "x")
    read("<function=execute_bash>\n" + "</parameter> x" * 50_000)
    assert process_time() - began < 10


def test_a_second_call_is_not_lost() -> None:
    one = "<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>\n"
    assert read(one + one + "<function=finish></function>") == ("", [LS, LS, ("finish", {})])


def test_one_bad_call_does_not_spoil_the_next() -> None:
    text = "<function=view>\n<parameter=nope>1</parameter>\n</function>\n<function=finish></function>"
    _, calls = read(text)
    assert [name for name, _ in calls] == ["view", "finish"]
    assert calls[1] == ("finish", {})


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("line", "7", 7),
        ("line", " 7\n", 7),
        ("share", "0.5", 0.5),
        ("is_quiet", "true", True),
        ("is_quiet", "False", False),
    ],
)
def test_values_get_their_types(name: str, value: str, typed: Any) -> None:
    text = f"<function=insert>\n<parameter={name}>{value}</parameter>\n</function>"
    assert read(text)[1] == [("insert", {name: typed})]


# The model's prompt

NOT_CLOSED = (
    "The call of function 'execute_bash' is cut off: parameter 'command' has no </parameter>. "
    "Write the whole call again; if it was too long, in smaller parts."
)
JUNK = (
    "Malformed call of function 'execute_bash': no <parameter=…> or </function> before "
    '"\'</parameter>\\n</function>". Inside a value, write <\\/parameter> for </parameter>.'
)
ALLOWED = "Allowed parameters: {'command', 'is_input'}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "<function=fly>\n</function>",
            f"Function 'fly' not found in available tools: {sorted(TOOLS)}",
        ),
        (
            "<function=execute_bash>\n<parameter=comand>ls</parameter>\n</function>",
            f"Parameter 'comand' is not allowed for function 'execute_bash'. {ALLOWED}",
        ),
        (
            "<function=finish>\n<parameter=x>1</parameter>\n</function>",
            "Parameter 'x' is not allowed for function 'finish'. Allowed parameters: {}",
        ),
        (
            "<function=execute_bash>\n</function>",
            "Missing required parameters for function 'execute_bash': {'command'}",
        ),
        (
            "<function=insert>\n<parameter=line>seven</parameter>\n</function>",
            "Parameter 'line' is expected to be an integer.",
        ),
        (
            "<function=insert>\n<parameter=line>true</parameter>\n</function>",
            "Parameter 'line' is expected to be an integer.",
        ),
        (
            "<function=insert>\n<parameter=share>NaN</parameter>\n</function>",
            "Parameter 'share' is expected to be a number.",
        ),
        (
            "<function=view>\n<parameter=path>a</parameter>\n<parameter=view_range>1, 2</parameter>\n</function>",
            "Parameter 'view_range' is expected to be an array.",
        ),
        (
            "<function=execute_bash>\n<parameter=command>x</parameter>\n<parameter=is_input>yes</parameter>\n</function>",
            "Parameter 'is_input' is expected to be one of ['true', 'false'].",
        ),
        ("<function=execute_bash>\n<parameter=command>ls\n</function>", NOT_CLOSED),
        ("<function=execute_bash>\n<parameter=command>l", NOT_CLOSED),
        (
            "<function=execute_bash>\n<parameter=command>ls\n</function>\n<function=view>\n<parameter=path>a</parameter>",
            NOT_CLOSED,
        ),
        (
            "<function=execute_bash>\n<parameter=command>a</parameter>\n<parameter=command>b</parameter>\n</function>",
            "Parameter 'command' is given twice for function 'execute_bash'.",
        ),
        (
            "<function=execute_bash>\n<parameter=command>echo '</parameter>'</parameter>\n</function>",
            JUNK,
        ),
        (
            '<function=execute_bash>{"command": "ls</function>',
            "Failed to parse the arguments of function 'execute_bash': Unterminated string starting at: line 1 column 36 (char 35).",
        ),
    ],
)  # fmt: skip
def test_problems_are_told(text: str, told: str) -> None:
    assert problem(text) == told


def test_call_with_a_problem_is_shown_as_written() -> None:
    text = "<function=execute_bash>\n<parameter=command>ls\n</function>"
    _, calls = read_calls(text, TOOLS, ids="t_")
    assert write_calls("", calls, TOOLS) == text


def test_names_that_no_tag_can_hold_are_written_as_json() -> None:
    written = write_calls("", [ToolCall("", "f>\n", '{"a b": 1}')], TOOLS)
    assert written == '<function=f__>\n{"a b": 1}\n</function>'
