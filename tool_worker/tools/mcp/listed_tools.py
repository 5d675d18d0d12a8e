"""Turns a tool listed by an MCP server into one that can be offered to a model.

Holds: no part of a server's text is hidden from human readers: terminal control characters, characters that reorder a
line, and invisible characters are escaped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from broker.contract import MAX_DESCRIPTION_CHARS, OutcomePolicy, ToolOffer
from tool_worker.tools.mcp.config import McpServerSpec

if TYPE_CHECKING:
    from mcp.types import Tool

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_TEXTS = frozenset({"description", "title", "$comment"})


def offer_of(spec: McpServerSpec, tool: Tool) -> ToolOffer:
    """Return the tool as published, under `<server>/<tool>`.

    Raises:
        ValueError: The tool cannot be offered; the text gives the reason.
    """
    if _UNSEEN.search(tool.name):
        raise ValueError("its name has characters that are not seen")
    hints = tool.annotations
    may_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    return ToolOffer(
        key=f"{prefix_of(spec)}{tool.name}",
        name=re.sub(r"[^A-Za-z0-9_-]", "_", tool.name)[:64],
        description=clean(tool.description or "")[:MAX_DESCRIPTION_CHARS],
        parameters=_cleaned(tool.input_schema),
        runner="mcp",
        pool=spec.pool,
        outcome=OutcomePolicy.IDEMPOTENT if may_repeat else OutcomePolicy.AT_MOST_ONCE,
    )


def prefix_of(spec: McpServerSpec) -> str:
    """Return the prefix of the keys of a server's tools."""
    return f"{spec.name}/"


def clean(text: str) -> str:
    r"""Return a text with invisible characters escaped, as in `\u202e`."""
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _cleaned(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with clean texts for readers; parts that validate arguments are unchanged.

    Raises:
        ValueError: A parameter's name has invisible characters.
    """

    def cleaned(part: Any, *, is_names: bool = False) -> Any:
        if isinstance(part, list):
            return [cleaned(item) for item in part]
        if not isinstance(part, dict):
            return part
        if any(_UNSEEN.search(key) for key in part):
            raise ValueError("a name in its schema has characters that are not seen")
        return {
            key: clean(item)
            if key in _TEXTS and isinstance(item, str) and not is_names
            else cleaned(item, is_names=key == "properties" and not is_names)
            for key, item in part.items()
        }

    found: dict[str, Any] = cleaned(schema)
    return found
