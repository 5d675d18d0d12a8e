"""The text about the browser that a model reads (OpenHands 10.6: url, focused element, error or success, tree).

Holds: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def page_text(
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
        notes: Other news, one line each.
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


def reading_text(*, url: str, error: str, notes: Sequence[str], text: str, console: Sequence[str] = ()) -> str:
    """Return the text after a page was opened for reading."""
    lines = [f"[Current URL: {url}]", *(f"[{note}]" for note in notes), *console]
    if error:
        lines += [ERROR_HEAD, error, ERROR_FOOT]
    return "\n".join([*lines, TEXT_HEAD, text, TEXT_FOOT])
