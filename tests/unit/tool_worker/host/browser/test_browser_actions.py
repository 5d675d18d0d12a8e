"""Actions in the browser as a model writes them."""

from __future__ import annotations

import pytest

from tool_worker.host.browser.action_strings import ACTIONS, MAX_CALLS, ActionStringError, parse_actions
from tool_worker.host.browser.page_actions import PageActions


def test_calls_are_read_in_order_with_all_their_arguments() -> None:
    first, second, third = parse_actions(
        "click('12', 'right', modifiers=['Alt'])\n# a note\nnoop(); fill('a3', value='Ada')"
    )
    assert (first.name, first.arguments) == ("click", {"bid": "12", "button": "right", "modifiers": ["Alt"]})
    assert (second.name, second.arguments) == ("noop", {"wait_ms": 1000})
    assert (third.name, third.arguments, third.text) == (
        "fill",
        {"bid": "a3", "value": "Ada"},
        "fill('a3', value='Ada')",
    )


def test_what_models_write_in_good_faith_is_taken() -> None:
    (click,) = parse_actions("  click(12)  ")
    assert click.arguments["bid"] == "12"
    (select,) = parse_actions("select_option('4', ['a', 2])")
    assert select.arguments["options"] == ["a", "2"]
    (one,) = parse_actions("upload_file('4', 'notes.txt')")
    assert one.arguments["file"] == ["notes.txt"]
    (scroll,) = parse_actions("scroll(0, -200.5)")
    assert scroll.arguments == {"delta_x": 0, "delta_y": -200.5}
    (surplus,) = parse_actions("click('81'))\n")
    assert (surplus.arguments["bid"], surplus.text) == ("81", "click('81')")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", "No action is given. The actions are: noop(wait_ms=1000), goto(url)"),
        ("click('1'", "The actions cannot be read: "),
        ("click('1')))", "The actions cannot be read: "),
        ("click = 3", "click = 3 is not an action. Write one call a line"),
        ("page.click('3')", "page.click('3') is not an action."),
        ("import os", "import os is not an action."),
        ("clic('3')", "There is no action 'clic'. The actions are: "),
        ("goto()", "'url' is missing: goto(url)."),
        ("goto('a', 'b')", "goto('a', 'b') does not fit goto(url)."),
        ("goto('a', url='b')", "does not fit goto(url)."),
        ("goto(**{'url': 'b'})", "does not fit goto(url)."),
        ("goto(open('/etc/passwd').read())", "must be plain values."),
        ("goto(__import__('os').environ)", "must be plain values."),
        ("goto(['a'])", "'url' cannot be ['a']: goto(url)."),
        ("noop(True)", "'wait_ms' cannot be True"),
        ("noop(1e300)", "'wait_ms' cannot be 1e+300"),
        ("click('1', 'upper')", "'button' cannot be 'upper': click(bid, button='left', modifiers=())."),
        ("click('1', modifiers=['Hyper'])", "'modifiers' cannot be ['Hyper']"),
        ("answer_dialogs('yes')", "'accept' cannot be 'yes'"),
        ("noop()\n" * (MAX_CALLS + 1), f"{MAX_CALLS + 1} actions are given; {MAX_CALLS} are allowed at once."),
        ("goto('" + "a" * 300_000 + "')", "The actions have 300008 characters; 200000 are allowed."),
        ("goto(" + "(" * 500 + ")" * 500 + ")", "The actions cannot be read: "),
        ("goto(" + "-" * 5_000 + "1)", "The actions cannot be read: "),
    ],
)
def test_anything_else_is_refused_with_what_would_fit(written: str, told: str) -> None:
    with pytest.raises(ActionStringError) as refused:
        parse_actions(written)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 1_500


def test_each_action_that_can_be_written_can_be_carried_out() -> None:
    for name, parameters in ACTIONS.items():
        method = getattr(PageActions, name)
        taken = method.__code__.co_varnames[1 : method.__code__.co_argcount]
        assert taken == tuple(parameter.name for parameter in parameters), name
