"""Whether an answer is the expected one, however it is written."""

from __future__ import annotations

import pytest

from deckhands.evaluation.scorers import find_answer, is_same


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("42", "42.0"),
        ("$1,234.50", "1234.5"),
        ("17 %", "17"),
        ("The Eiffel-Tower", "eiffel tower"),
        ("a, b,c", "A, B, C"),
        ("1; 2.0", "1;2"),
        ("Saint  Petersburg.", "saint petersburg"),
        ("a", "A"),
        ("A.", "A"),
        ("-", "-"),
        ("1, 2, 3", "1,2,3"),
        ("1,2,3", "1, 2, 3"),
        ("1,234", "1234"),
        ("1234", "1,234"),
        ("NaN", "nan"),
    ],
)
def test_the_same(given: str, expected: str) -> None:
    assert is_same(given, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("41", "42"), ("forty-two", "42"), ("a, b", "a, b, c"), ("", "x"), ("b, a", "a, b")),
        *(("", "A"), ("The", "A"), ("+", "-"), ("12,3", "1,2,3"), ("123", "1,2,3")),
    ],
)
def test_not_the_same(given: str, expected: str) -> None:
    assert not is_same(given, expected)


def test_the_last_final_answer_counts() -> None:
    assert find_answer("FINAL ANSWER: 3\nNo.\nFinal answer: 4\n") == "4"
    assert find_answer(" just this ") == "just this"


@pytest.mark.parametrize(
    "text", ["**FINAL ANSWER:** 42", "FINAL ANSWER: **42**", "**Final answer: 42**", "FINAL ANSWER: `42`"]
)
def test_marks_of_markdown_are_no_part_of_an_answer(text: str) -> None:
    assert find_answer(text) == "42"
