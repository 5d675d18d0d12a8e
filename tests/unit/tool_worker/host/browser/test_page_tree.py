"""The text of a page's accessibility tree, and its pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from tool_worker.host.browser.page_tree import CUT, MAX_CHARS, FrameTree, render_page, render_tree
from tool_worker.host.browser.set_of_marks import ElementMark, render_pictures


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
