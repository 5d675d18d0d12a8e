"""Collects the output of an ACP agent into one report of bounded size.

Holds: every input gives a report; values of a wrong type count as absent.
"""

from __future__ import annotations

import json
from typing import Any

TEXT_LIMIT_CHARS = 64 * 1024
FULL_CHARS = 32 * 1024
"""A report with this much text is sent at once."""
OUTPUT_LIMIT_CHARS = 16 * 1024
DIFF_LIMIT_CHARS = 32 * 1024
DIFFS_LIMIT = 16
ARGUMENTS_LIMIT_CHARS = 16 * 1024
NAME_LIMIT_CHARS = 1000
PLAN_LIMIT = 200
PATHS_LIMIT = 64
OPTIONS_LIMIT = 16
MAX_COUNT = 2**53
DEPTH_LIMIT = 20
ENDED = ("completed", "failed")
PLAN_STATES = {"pending": "todo", "in_progress": "in_progress", "completed": "done"}
CUT = "\n[... left out ...]\n"

Fields = dict[str, Any]


def text_in(value: object, limit: int = NAME_LIMIT_CHARS) -> str:
    """Return a text, truncated in the middle; empty for other types."""
    if not isinstance(value, str):
        return ""
    half = limit // 2
    return value if len(value) <= limit else f"{value[:half]}{CUT}{value[-half:]}"


def list_in(value: object, limit: int) -> list[Any]:
    """Return the first items of a list; empty for other types."""
    return value[:limit] if isinstance(value, list) else []


def fields_in(value: object) -> Fields:
    """Return a JSON object; empty for other types."""
    return value if isinstance(value, dict) else {}


def count_in(value: object) -> int:
    """Return a count of at least 0 and at most `MAX_COUNT`; 0 for other types."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return min(max(value, 0), MAX_COUNT) if is_count and isinstance(value, int) else 0


def block_text(block: object) -> str:
    """Return a content block as text; a block without text is represented by its name."""
    found = fields_in(block)
    if "text" in found:
        return text_in(found["text"], TEXT_LIMIT_CHARS)
    resource = fields_in(found.get("resource"))
    if "text" in resource:
        return text_in(resource["text"], TEXT_LIMIT_CHARS)
    where = text_in(found.get("uri")) or text_in(resource.get("uri"))
    kind = text_in(found.get("type"), 40)
    if where:
        return f"[{kind} {where}]"
    return f"[{kind}]" if kind else ""


class AgentToolCall:
    """The reported state of a tool call.

    Attributes:
        terminal_ids: Terminals whose output belongs to the call.
    """

    def __init__(self) -> None:
        self.terminal_ids: list[str] = []
        self._fields: Fields = {}
        self._text = ""
        self._diffs: list[Fields] = []

    @property
    def has_ended(self) -> bool:
        """Whether the call has completed or failed."""
        return self._fields.get("status") in ENDED

    def add(self, told: Fields) -> None:
        """Update the call from the agent's message; omitted fields keep their values."""
        for name, field in (("title", "title"), ("kind", "tool_kind"), ("status", "status")):
            if text := text_in(told.get(name)):
                self._fields[field] = text
        if isinstance(told.get("locations"), list):
            paths = [text_in(fields_in(place).get("path")) for place in list_in(told["locations"], PATHS_LIMIT)]
            self._fields["paths"] = list(filter(None, paths))
        if told.get("rawInput") is not None:
            self._fields["arguments"] = _arguments(told["rawInput"])
        if isinstance(told.get("content"), list):
            self._add_content(told["content"])
        if not self._text and told.get("rawOutput") is not None:
            raw = told["rawOutput"]
            if isinstance(raw, str):
                self._text = text_in(raw, OUTPUT_LIMIT_CHARS)
            elif _is_flat(raw, DEPTH_LIMIT):
                self._text = text_in(json.dumps(raw), OUTPUT_LIMIT_CHARS)

    def to_fields(self, terminals: str = "") -> Fields:
        """Return the call's fields for a report; `terminals` is the output of its terminals."""
        text = text_in("\n".join(filter(None, (self._text, terminals))), OUTPUT_LIMIT_CHARS)
        return {**self._fields, "text": text, "diffs": self._diffs}

    def _add_content(self, content: list[Any]) -> None:
        texts, self._diffs, self.terminal_ids = [], [], []
        for block in map(fields_in, list_in(content, 256)):
            if block.get("type") == "diff":
                old = text_in(block["oldText"], DIFF_LIMIT_CHARS) if isinstance(block.get("oldText"), str) else None
                new = text_in(block.get("newText"), DIFF_LIMIT_CHARS)
                self._diffs.append({"path": text_in(block.get("path")), "old_text": old, "new_text": new})
            elif block.get("type") == "terminal":
                self.terminal_ids.append(text_in(block.get("terminalId")))
            else:
                texts.append(block_text(block.get("content")))
        self._diffs = self._diffs[:DIFFS_LIMIT]
        self._text = text_in("\n".join(filter(None, texts)), OUTPUT_LIMIT_CHARS)


class AcpReport:
    """The agent's messages, tool calls and plan since the previous report."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "thoughts": []}
        self._sizes = {"content": 0, "thoughts": 0}
        self._fields: Fields = {}

    @property
    def is_full(self) -> bool:
        """Whether the report should be sent before it grows further."""
        return max(self._sizes.values()) > FULL_CHARS

    @property
    def has_text(self) -> bool:
        """Whether the report has message text."""
        return bool(self._sizes["content"])

    def add_text(self, field: str, text: str) -> None:
        """Append text to `content` or `thoughts`."""
        left = TEXT_LIMIT_CHARS - self._sizes[field]
        self._texts[field].append(text[: max(left, 0)])
        self._sizes[field] += len(text)

    def set(self, **fields: object) -> None:
        """Set fields; see `broker.contract.session_events.AcpObservation`."""
        self._fields.update(fields)

    def set_plan(self, entries: object) -> None:
        """Set the plan."""
        found = [fields_in(entry) for entry in list_in(entries, PLAN_LIMIT)]
        self._fields["plan"] = [
            {
                "id": str(number),
                "title": text_in(entry.get("content")),
                "status": PLAN_STATES.get(text_in(entry.get("status")), "todo"),
            }
            for number, entry in enumerate(found, 1)
        ]

    def fields(self) -> Fields:
        """Return the whole report as plain JSON values."""
        return {name: "".join(parts) for name, parts in self._texts.items()} | self._fields


def permission_of(number: int, call: Fields, options: object) -> Fields:
    """Return an agent's permission request in the form of a report."""
    found = [fields_in(option) for option in list_in(options, OPTIONS_LIMIT)]
    shown = [
        {
            "id": option["optionId"],
            "name": text_in(option.get("name")),
            "option_kind": text_in(option.get("kind")),
        }
        for option in found
        if isinstance(option.get("optionId"), str) and len(option["optionId"]) <= NAME_LIMIT_CHARS
    ]
    return {"number": number, "call": call, "options": shown}


def _arguments(raw: object) -> Fields:
    if not _is_flat(raw, DEPTH_LIMIT):
        return {"input": "[nested too deep]"}
    text = json.dumps(raw)
    if len(text) > ARGUMENTS_LIMIT_CHARS:
        return {"input": text_in(text, ARGUMENTS_LIMIT_CHARS)}
    return raw if isinstance(raw, dict) else {"input": raw}


def _is_flat(value: object, depth: int) -> bool:
    """Return whether a value is nested shallowly enough for every JSON parser."""
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(
        _is_flat(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value)
    )
