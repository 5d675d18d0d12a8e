"""Lines and messages between tool worker and host, and JSON without the module json."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.observations import TRUNCATION_MARKER
from broker.secrets.masking import MASK, Masker
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.json_text import dumps, loads
from tool_worker.host.protocol import FRAME_LIMIT_BYTES, Lines, ProtocolError, decode, encode
from tool_worker.host.server import truncate_result
from tool_worker.host.shell.bash_call import COMMAND_LIMIT_BYTES, BashCall, BashCallError


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())))
def test_a_message_is_one_line_and_comes_back(message: dict[str, object]) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_lone_surrogates_pass() -> None:
    assert decode(encode({"a": "\udc80"})) == {"a": "\udc80"}


@pytest.mark.parametrize("line", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_other_things_are_not_messages(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line)


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.integers(1, 30))
def test_lines_come_out_however_the_stream_is_cut(lines: list[bytes], size: int) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    cutter = Lines()
    found = [line for start in range(0, len(stream), size) for line in cutter.feed(stream[start : start + size])]
    assert found == lines


def test_an_endless_line_is_an_error() -> None:
    cutter = Lines()
    for _ in range(FRAME_LIMIT_BYTES // 2**22):
        assert cutter.feed(b"x" * 2**22) == []
    with pytest.raises(ProtocolError):
        cutter.feed(b"x")


def test_results_are_bounded_before_they_are_kept() -> None:
    long = "a" * 600 + "b" * 600
    result = {
        "content": long,
        "old_content": long,
        "new_content": "short",
        "diff": None,
        "path": "/p",
        "is_error": False,
    }
    assert truncate_result(result, 1000) == {
        **result,
        "content": "a" * 500 + TRUNCATION_MARKER + "b" * 500,
        "old_content": None,
    }
    assert truncate_result(result, 1200) == result


def test_secret_remainder_at_a_result_cut_is_masked() -> None:
    cut = truncate_result({"content": "a" * 492 + "ghp_0123456789abcdef" + "b" * 600}, 1000)
    assert (
        Masker(["ghp_0123456789abcdef"]).mask_wire(cut)["content"] == "a" * 492 + MASK + TRUNCATION_MARKER + "b" * 500
    )


def test_a_configuration_comes_back() -> None:
    configuration = HostConfiguration(
        workspace="/w",
        identity=[1, 2],
        environment={"A": "ü"},
        ttl_seconds=1.5,
        idle_seconds=0.5,
        resource_limits={"RLIMIT_CORE": 0},
        announces_pid=True,
    )
    assert vars(HostConfiguration.decode(configuration.encode())) == vars(configuration)


@pytest.mark.parametrize(
    ("command", "is_input", "key"),
    [("C-c", True, "C"), ("C-c", False, None), ("C-cc", True, None), ("c-c", True, None), ("C-\\", True, "\\")],
)
def test_keys(command: str, is_input: bool, key: str | None) -> None:
    assert BashCall(command, is_input=is_input, no_change_timeout=1).key == key


def test_blocking_means_no_limit_on_silence() -> None:
    assert BashCall("x", no_change_timeout=3).no_change_timeout == 3
    assert BashCall("x", no_change_timeout=3, blocking=True).no_change_timeout is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": 1},
        {"command": "x" * (COMMAND_LIMIT_BYTES + 1)},
        {"command": "x", "timeout": "soon"},
        {"command": "x", "timeout": True},
        {"command": "x", "timeout": float("nan")},
        {"command": "x", "no_change_timeout": -1},
        {"command": "x", "cwd": 1},
        {"command": "x", "env": ["A"]},
        {"command": "x", "env": {"A": 1}},
        {"command": "x", "env": {"A;touch /": "1"}},
        {"command": "x", "env": {"A": "\0"}},
    ],
)
def test_unusable_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(BashCallError):
        BashCall(**{"no_change_timeout": 1, **arguments})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@given(VALUES)
def test_values_and_texts_are_those_of_the_standard_library(value: object) -> None:
    text = dumps(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert loads(text.encode()) == value
    assert loads(json.dumps(value, indent=1).encode()) == value
    assert loads(b" \n" + json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\t") == value


@given(st.binary() | st.text(st.sampled_from('{}[]",:\\u0d8e1-.truefalsn ')).map(str.encode))
def test_both_parsers_reject_the_same_invalid_json(text: bytes) -> None:
    try:
        expected = json.loads(text.decode())
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011  (each has its own words for it)
            loads(text)
    else:
        assert loads(text) == expected


def test_numbers_that_json_does_not_know() -> None:
    assert dumps([math.inf, -math.inf]) == "[Infinity,-Infinity]"
    assert loads(b"[Infinity,-Infinity]") == [math.inf, -math.inf]
    assert math.isnan(loads(b"NaN"))


def test_invalid_messages_are_not_written() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        dumps(endless)
    with pytest.raises(TypeError, match="Object of type set is not JSON serializable"):
        dumps({1, 2})


def test_too_deeply_nested_message_is_refused() -> None:
    with pytest.raises(RecursionError):
        loads(b"[" * 100_000)
