"""The text about a page that a model reads (OpenHands 10.6: url, focused element, error or success, tree).

The accessibility tree has one line for each node: `[12] button 'Send', clickable`.

Holds: pure functions; the text is bounded, however deep, long or odd the page is.
Differs: the text is rendered in the browser's session and the tree itself is not stored; the log needs it only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CHARS = 500_000
MAX_DEPTH_SHOWN = 40
MAX_URL_CHARS = 200
CUT = "[The rest of the page is left out: it is too long.]"

DONE = "[Action executed successfully.]"
TREE_HEAD = (
    "Accessibility tree of the whole page. A line begins with the [bid] of its element: actions name elements by it.\n"
    "============== BEGIN accessibility tree =============="
)
TREE_FOOT = "============== END accessibility tree =============="
TEXT_HEAD = "============== BEGIN webpage content =============="
TEXT_FOOT = "============== END webpage content =============="
ERROR_HEAD = "================ BEGIN error message ===============\nThe last action failed:"
ERROR_FOOT = "================ END error message ==============="

# BrowserGym leaves these out of a tree.
SKIPPED_ROLES = frozenset({"LineBreak", "InlineTextBox", "none", "presentation"})
SKIPPED_PROPERTIES = frozenset(
    {"editable", "readonly", "level", "settable", "multiline", "invalid", "focusable"}
    # of newer Chromium versions, and useless to a reader of the page
    | {"labelledby", "describedby", "owns", "controls", "flowto", "details", "activedescendant", "errormessage"}
    | {"actions", "live", "relevant", "busy", "root", "hiddenRoot"}
)
FLAGS = frozenset({"required", "focused", "atomic"})

Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FrameTree:
    """The tree of one frame.

    Attributes:
        nodes: The nodes in the browser's form.
        bids: The bids of its elements, by backend node id.
        frames: The frames inside it, by the backend node id of the element that shows each.
    """

    nodes: Sequence[Node]
    bids: Mapping[int, str] = field(default_factory=dict)
    frames: Mapping[int, FrameTree] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PendingNode:
    """A node that is still to be rendered.

    Attributes:
        above: The name of the nearest rendered ancestor.
    """

    node: Node
    tree: FrameTree
    depth: int
    above: str


def render_page(
    *,
    url: str,
    focused_bid: str,
    tabs: Sequence[str],
    active: int,
    error: str,
    notes: Sequence[str],
    tree: str,
    console: Sequence[str] = (),
) -> str:
    """Return the text after actions.

    Args:
        tabs: The addresses of all tabs, in order.
        active: The index of the active tab.
        error: The error text; empty if there was no error.
        notes: Other notes for the model, one line each.
        tree: Empty if the page could not be viewed.
        console: Developer messages, one line each.
    """
    lines = [f"[Current URL: {url}]", f"[Focused element bid: {focused_bid}]"]
    if len(tabs) > 1:
        lines.append("[Tabs:]")
        lines += [f"  {number}: {tab}{' (active)' if number == active else ''}" for number, tab in enumerate(tabs)]
    lines += [*(f"[{note}]" for note in notes), *console]
    lines += ["", *([ERROR_HEAD, error, ERROR_FOOT] if error else [DONE])]
    if tree:
        lines += [TREE_HEAD, tree, TREE_FOOT]
    return "\n".join(lines)


def render_reading(*, url: str, error: str, notes: Sequence[str], text: str, console: Sequence[str] = ()) -> str:
    """Return the text after a page was opened for reading."""
    lines = [f"[Current URL: {url}]", *(f"[{note}]" for note in notes), *console]
    if error:
        lines += [ERROR_HEAD, error, ERROR_FOOT]
    return "\n".join([*lines, TEXT_HEAD, text, TEXT_FOOT])


def render_tree(tree: FrameTree, clickable: frozenset[str] = frozenset()) -> str:
    """Return a page as text.

    Args:
        clickable: The bids of clickable elements.
    """
    lines: list[str] = []
    length = 0
    by_id: dict[int, dict[str, Node]] = {}
    waiting = _roots(tree, 0, "")
    while waiting:
        place = waiting.pop()
        line, name = _line(place, clickable)
        depth, above = place.depth, place.above
        if line:
            lines.append("\t" * min(depth, MAX_DEPTH_SHOWN) + line)
            length += len(lines[-1]) + 1
            if length > MAX_CHARS:
                return "\n".join([*lines[:-1], CUT])
            depth, above = depth + 1, name
        frame = place.tree.frames.get(place.node.get("backendDOMNodeId", -1))
        if frame is not None:
            waiting += _roots(frame, depth, above)
        if id(place.tree) not in by_id:
            by_id[id(place.tree)] = {str(node.get("nodeId")): node for node in place.tree.nodes}
        index = by_id[id(place.tree)]
        # Each node is rendered once, even if the data is not a proper tree.
        children = [index.pop(child, None) for child in place.node.get("childIds", ())]
        waiting += [_PendingNode(child, place.tree, depth, above) for child in reversed(children) if child is not None]
    return "\n".join(lines)


def _roots(tree: FrameTree, depth: int, above: str) -> list[_PendingNode]:
    return [_PendingNode(tree.nodes[0], tree, depth, above)] if tree.nodes else []


def _line(place: _PendingNode, clickable: frozenset[str]) -> tuple[str, str]:
    """Return a node's line, empty if it has none, and its name."""
    node = place.node
    role = str(node.get("role", {}).get("value", ""))
    name = str(node.get("name", {}).get("value", "")).strip()
    if node.get("ignored") or role in SKIPPED_ROLES or not role:
        return "", ""
    bid = place.tree.bids.get(node.get("backendDOMNodeId", -1), "")
    if role == "StaticText":
        return ("", "") if not name or name in place.above else (f"StaticText {name!r}", name)
    traits = _traits(node, role)
    if bid in clickable:
        traits.insert(0, "clickable")
    if role == "generic" and not traits:
        return "", ""
    words = role if role == "generic" and not name else f"{role} {name!r}"
    value = node.get("value", {}).get("value")
    shown = f" value={value!r}" if value not in (None, "") else ""
    return (f"[{bid}] " if bid else "") + words + shown + "".join(f", {trait}" for trait in traits), name


def _traits(node: Node, role: str) -> list[str]:
    traits: list[str] = []
    for one in node.get("properties", ()):
        name, value = one.get("name"), one.get("value", {}).get("value")
        if name in SKIPPED_PROPERTIES or value is None:
            continue
        if name == "url":
            if role == "link":
                traits.append(f"url={str(value)[:MAX_URL_CHARS]!r}")
        elif name in FLAGS:
            traits += [name] if value else []
        else:
            traits.append(f"{name}={value!r}")
    return traits
