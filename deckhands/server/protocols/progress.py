"""One-line descriptions of an agent's work, for clients of other protocols.

Does not: show results; the events of the log do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_SHOWN = 500
SAID = frozenset({"action.message", "action.finish", "action.reject", "action.system", "action.null"})
"""Kinds that are answers, or of no interest to a reader."""
SHOWN = ("command", "path", "code", "url", "query", "agent", "name", "tool")


def describe(event: Mapping[str, Any], *, has_thought: bool = True) -> str:
    """Return a description of an event; empty if it is of no interest.

    Args:
        has_thought: include the agent's accompanying message.
    """
    kind = str(event.get("kind", ""))
    if not kind.startswith("action.") or kind in SAID or event.get("source") != "agent":
        return ""
    thought = str(event.get("thought") or "").strip() if has_thought else ""
    return "\n".join(part for part in (thought, title_of(event)) if part)


def title_of(event: Mapping[str, Any]) -> str:
    """Return a one-line title of an action."""
    what = next((str(event[name]) for name in SHOWN if event.get(name)), "")
    line = " ".join(what.split())
    return f"{str(event.get('kind', '')).removeprefix('action.')}: {line[:MAX_SHOWN]}".removesuffix(": ")
