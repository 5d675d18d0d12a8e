"""The agent's text as it is written: each word once and in order, from pieces that may be lost and recorded replies.

Holds: no text is emitted twice, and none is left out. After a lost piece, the rest of its reply is taken from the log.
Only if a call failed and was repeated with another text is the failed text emitted too.
Does not: read or write anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

FINISH = re.compile(r'finish \s*\{\s*"message"\s*:\s*"')
"""The start of a finish call in pieces, up to its message."""
AHEAD = 512
"""How many pieces are kept until the previous reply was read; the text of further ones comes from the log."""
STRING = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
LONE_SURROGATE = re.compile("[\ud800-\udfff]$")
GAP = "\n\n"
"""The separator of replies."""


class AnswerText:
    """The text of one answer.

    Args:
        step: the first step of the answer, from 1.

    Attributes:
        _call: the model call that writes the reply of this step.
        _runs: the pieces so far by kind (text, tool calls, thinking), up to the first missing piece.
        _is_whole: no piece is missing.
        _said: the text of this reply that was emitted.
        _has_said: text of an earlier reply was emitted.
        _last: the texts of the last recorded reply, whole and in parts.
        _ahead: pieces of the next step that arrived before the reply of this one.
    """

    def __init__(self, step: int = 1) -> None:
        self._last: frozenset[str] = frozenset()
        self._ahead: list[Mapping[str, Any]] = []
        self._runs: dict[str, str] = {}
        self._said, self._call, self._has_said = "", "", False
        self._start_reply(step)

    def add_piece(self, piece: Mapping[str, Any]) -> str:
        """Add a piece of a reply, and return the text to emit now."""
        call, kind, text, at = piece["call"], piece["kind"], piece["text"], piece["at"]
        if not call.startswith(f"{self._step}."):
            if call.startswith(f"{self._step + 1}.") and len(self._ahead) < AHEAD:
                self._ahead.append(piece)
            return ""
        if call != self._call or at == 0:
            self._call = call  # another call, or a retry of the same one
            self._runs = {}
            self._is_whole = True
        self._is_whole = self._is_whole and at == sum(map(len, self._runs.values()))
        if not self._is_whole:
            return ""
        self._runs[kind] = self._runs.get(kind, "") + text
        found = _join(self._runs.get("text", ""), _message_in(self._runs.get("call", ""))).lstrip()
        return self._emit(found[len(self._said) :]) if found.startswith(self._said) else ""

    def add_reply(self, event: Mapping[str, Any]) -> str:
        """Add a recorded reply, and return its text that was not emitted yet."""
        if event.get("service", "agent") != "agent":
            return ""
        whole, self._last = answers_of(event)
        rest = _rest_behind(self._said, whole)
        found = self._emit(GAP + whole if rest is None else rest)
        ahead = self._ahead
        self._start_reply(int(event.get("iteration") or 0) + 1)
        return found + "".join(map(self.add_piece, ahead))

    def finish(self, answer: str) -> str:
        """Return the missing rest of the answer, which may differ from every model reply."""
        return "" if _bare(answer) in self._last else self._emit(answer)

    def _start_reply(self, step: int) -> None:
        self._has_said = self._has_said or bool(self._said)
        self._step = step
        self._call = ""
        self._is_whole = True
        self._said = ""
        self._runs = {}
        self._ahead = []

    def _emit(self, text: str) -> str:
        """Record a text as emitted, and return it; replies are separated by a gap."""
        text = text if self._said else text.lstrip()
        first = GAP if text and self._has_said and not self._said else ""
        self._said += text
        return first + text


def answers_of(event: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """Return the text of a recorded reply, and the agent's possible messages from it, without white space."""
    parts = (str(event.get("content") or ""), _finish_of(event))
    whole = _join(*parts)
    return whole, frozenset(_bare(each) for each in (whole, *parts))


def _join(*parts: str) -> str:
    return GAP.join(part for part in parts if part.strip())


def _message_in(call: str) -> str:
    """Return the message of a finish call as far as it is written; empty for other calls, or without a message yet."""
    begun = FINISH.match(call)
    if begun is None:
        return ""
    written = STRING.match(call, begun.end())
    assert written is not None
    try:
        return LONE_SURROGATE.sub("", str(json.loads(f'"{written.group()}"', strict=False)))
    except ValueError:
        return ""


def _finish_of(event: Mapping[str, Any]) -> str:
    """Return the message of the finish call in a reply; empty if it has none."""
    for call in event.get("tool_calls") or ():
        if call.get("name") == "finish":
            try:
                found = json.loads(call.get("arguments") or "", strict=False)
            except (ValueError, RecursionError):
                return ""
            message = found.get("message") if isinstance(found, dict) else None
            return message if isinstance(message, str) else ""
    return ""


def _rest_behind(said: str, whole: str) -> str | None:
    """Return the text after the emitted part; None if it does not start with that part. Ignores whitespace."""
    if whole.startswith(said):
        return whole[len(said) :]
    place = 0
    for character in _bare(said):
        while place < len(whole) and whole[place].isspace():
            place += 1
        if not whole.startswith(character, place):
            return None
        place += 1
    return whole[place:].lstrip() if said[-1:].isspace() else whole[place:]


def _bare(text: str) -> str:
    return "".join(text.split())
