"""The bar of a long command, as a line."""

from __future__ import annotations

from deckhands.cli.progress import bar_line


def test_a_bar_says_how_far_how_fast_and_how_long():
    assert bar_line("25 of 100 tasks", 25, 100, 30.0) == (
        "[######------------------]  25 % 25 of 100 tasks · 0:30 · 1:30 left"
    )
    assert bar_line("100 of 100 tasks", 100, 100, 61.0) == "[########################] 100 % 100 of 100 tasks · 1:01"
    assert bar_line("0 of 0 tasks", 0, 0, 0.5) == "[------------------------] 100 % 0 of 0 tasks · 0:00"
    assert bar_line("3 of 2 tasks", 3, 2, 2.0) == "[########################] 100 % 3 of 2 tasks · 0:02"
    assert bar_line("50 tasks", 50, None, 10.0) == "50 tasks · 5.0/s · 0:10"
    assert bar_line("50 tasks", 50, None, 0.5) == "50 tasks · 0:00"
