"""JSON without the module `json`: the same texts and the same values."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.host.json_text import dumps, loads

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


def test_what_cannot_be_written() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        dumps(endless)
    with pytest.raises(TypeError, match="Object of type set is not JSON serializable"):
        dumps({1, 2})


def test_what_is_nested_too_deeply() -> None:
    with pytest.raises(RecursionError):
        loads(b"[" * 100_000)
