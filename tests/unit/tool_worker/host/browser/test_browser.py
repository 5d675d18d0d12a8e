"""The browser: its proxy, actions as a model writes them, and the text and pictures of a page."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from tool_worker.host.browser.action_strings import ACTIONS, MAX_CALLS, ActionStringError, parse_actions
from tool_worker.host.browser.chromium import OF_THIS_MACHINE, find_proxy
from tool_worker.host.browser.page_actions import PageActions
from tool_worker.host.browser.page_tree import CUT, MAX_CHARS, FrameTree, render_page, render_tree
from tool_worker.host.browser.set_of_marks import ElementMark, render_pictures

OWN = "http://127.0.0.1:3128"
OTHER = "http://proxy.example:8080"


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"no": "example.com"}, None),
        *(({scheme: OWN}, {"server": OWN, "bypass": OF_THIS_MACHINE}) for scheme in ("http", "https", "all")),
        (
            {"https": "proxy.example:8080", "no": "intern.example,.lan"},
            {"server": OTHER, "bypass": f"{OF_THIS_MACHINE},intern.example,.lan"},
        ),
        (
            {"http": "http://ada:p%40ss@proxy.example:8080"},
            {"server": OTHER, "bypass": OF_THIS_MACHINE, "username": "ada", "password": "p@ss"},
        ),
    ],
)
def test_proxy_of_an_environment(environment: dict[str, str], proxy: dict[str, str] | None) -> None:
    assert find_proxy(environment) == proxy


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


def test_tolerated_forms_of_calls() -> None:
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


def node(number: int, role: str, name: str = "", *, children: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    properties = [{"name": key, "value": {"value": value}} for key, value in fields.pop("properties", {}).items()]
    return {
        "nodeId": str(number),
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(child) for child in children],
        "backendDOMNodeId": number,
        "properties": properties,
        **fields,
    }


def test_line_shows_an_element_and_its_state() -> None:
    nodes = [
        node(1, "RootWebArea", "Shop", children=(2, 5)),
        node(2, "none", children=(3, 4), ignored=True),
        node(3, "button", "Buy", properties={"focusable": True, "focused": True}, children=(6,)),
        node(4, "textbox", "Name", value={"value": "Ada"}, properties={"required": True, "invalid": "false"}),
        node(5, "generic", children=(7,)),
        node(6, "StaticText", "Buy"),
        node(7, "StaticText", "it's 5 €"),
    ]
    assert render_tree(FrameTree(nodes, {3: "12", 4: "13", 5: "14"}), frozenset({"12"})).splitlines() == [
        "RootWebArea 'Shop'",
        "\t[12] button 'Buy', clickable, focused",
        "\t[13] textbox 'Name' value='Ada', required",
        '\tStaticText "it\'s 5 €"',
    ]


def test_a_frame_stands_where_its_element_is() -> None:
    inner = FrameTree([node(1, "RootWebArea", "", children=(2,)), node(2, "button", "In")], {2: "a1"})
    outer = [node(1, "RootWebArea", "", children=(2, 3)), node(2, "Iframe", ""), node(3, "button", "Out")]
    assert render_tree(FrameTree(outer, {2: "a", 3: "1"}, {2: inner})).splitlines() == [
        "RootWebArea ''",
        "\t[a] Iframe ''",
        "\t\tRootWebArea ''",
        "\t\t\t[a1] button 'In'",
        "\t[1] button 'Out'",
    ]


def test_nameless_element_is_shown_where_clickable() -> None:
    nodes = [node(1, "RootWebArea", children=(2, 3)), node(2, "generic"), node(3, "generic")]
    assert (
        render_tree(FrameTree(nodes, {2: "8", 3: "9"}), frozenset({"9"})) == "RootWebArea ''\n\t[9] generic, clickable"
    )


def test_circular_or_deep_tree_is_bounded() -> None:
    circle = [node(1, "RootWebArea", "x", children=(2,)), node(2, "list", "y", children=(1, 2))]
    assert render_tree(FrameTree(circle)).count("\n") <= 2
    deep = [node(n, "group", "g", children=(n + 1,)) for n in range(20_000)]
    text = render_tree(FrameTree(deep))
    assert text.endswith(CUT)
    assert len(text) <= MAX_CHARS + len(CUT) + 1


def test_what_is_told_after_an_action() -> None:
    text = render_page(
        url="http://a",
        focused_bid="3",
        tabs=("http://a", "http://b"),
        active=1,
        error="",
        notes=("A note",),
        tree="tree",
    )
    assert text.splitlines()[:7] == [
        "[Current URL: http://a]",
        "[Focused element bid: 3]",
        "[Tabs:]",
        "  0: http://a",
        "  1: http://b (active)",
        "[A note]",
        "",
    ]
    assert "[Action executed successfully.]" in text
    failed = render_page(url="", focused_bid="", tabs=(), active=-1, error="No such element.", notes=(), tree="")
    assert "The last action failed:\nNo such element.\n" in failed
    assert "executed successfully" not in failed
    assert "accessibility tree" not in failed


def test_marks_are_drawn_around_elements() -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (200, 100), "white").save(drawn, "PNG")
    plain, marked = (
        Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
        for url in render_pictures(drawn.getvalue(), [ElementMark("a12", 20, 40, 120, 80)])
    )
    assert plain.size == marked.size == (200, 100)
    assert plain.convert("L").getextrema()[0] > 250
    assert marked.convert("L").getpixel((20, 60)) < 120  # the frame
    assert marked.convert("L").getpixel((70, 60)) > 240  # what is inside stays
    assert marked.convert("L").getpixel((21, 26)) < 120  # the label above it
