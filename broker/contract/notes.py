"""Notes that an agent keeps for later conversations: values and events.

A notebook belongs to one project of a user of a tenant. All conversations with the same `MemorySpec` share it.

Holds: notes are short and a notebook holds few, so a recall is cheap. Recalled notes are in the log of the conversation
that recalled them, even if the notebook changes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, ClassVar, Literal

from pydantic import Field

from broker.contract.events import Action, EventSource, EventValue, Observation
from broker.contract.skills import find_trigger
from broker.contract.specs import MemorySpec
from broker.contract.tool_arguments import ToolCallError, parse_optional_text, require_text
from broker.contract.tool_specs import ToolSpec

MAX_NOTES = 200
MAX_NOTE_CHARS = 1_000
MAX_KEYWORDS = 8
MAX_KEYWORD_CHARS = 64
MAX_RECALLED_CHARS = 12_000
"""The limit for notes without keywords, which are recalled at the start of every conversation."""
ID_CHARS = 8

NOTE = ToolSpec(
    name="note",
    description=(
        "Keep notes for later conversations with this person about this project. `write` adds a note, or replaces the "
        "one whose id you give; `forget` removes one; `list` shows all. Write down what will still be true and useful "
        "another time: what the person prefers, how the project is built and tested, what turned out not to work. "
        "Leave out what the files say, what only matters now, and every secret. Replace or forget what is out of date."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["write", "forget", "list"], "description": "What to do."},
            "text": {
                "type": "string",
                "description": f"For `write`: the note, one fact or rule, at most {MAX_NOTE_CHARS} characters.",
            },
            "keywords": {
                "type": "array",
                "items": {"type": "string"},
                "description": "For `write`: the note is recalled when a message mentions one of these words. Without "
                "keywords it is recalled at the beginning of every conversation.",
            },
            "id": {"type": "string", "description": "For `forget`, or to replace a note: its id."},
        },
        "required": ["command"],
    },
)


@dataclass(frozen=True, slots=True, order=True)
class NotebookKey:
    """The key of a notebook; each part is a name or empty."""

    tenant: str
    user: str
    project: str

    @classmethod
    def of(cls, memory: MemorySpec, *, tenant: str = "") -> NotebookKey:
        """Return the notebook of a conversation."""
        return cls(tenant, memory.user, memory.project)


class Note(EventValue):
    """One note.

    Attributes:
        keywords: the note is recalled if a message contains one of these words; if empty, at the start of every
            conversation.
        conversation_id: the conversation that wrote it; empty if a user wrote it.
    """

    id: str = Field(min_length=1, max_length=64)
    text: str = Field(min_length=1, max_length=MAX_NOTE_CHARS)
    keywords: tuple[str, ...] = ()
    written: datetime | None = None
    conversation_id: str = ""


class NoteAction(Action):
    """Write a note, delete one, or list all."""

    kind: Literal["action.note"] = "action.note"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = NOTE
    enabled_by: ClassVar[str] = "memory"
    source: EventSource = EventSource.AGENT
    command: Literal["write", "forget", "list"] = "list"
    text: str = ""
    keywords: tuple[str, ...] = ()
    note_id: str = ""

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        match self.command:
            case "write":
                return f"Noting: {self.text}"
            case "forget":
                return f"Forgetting the note {self.note_id}"
        return "Looking through the notes"

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`."""
        command = require_text(arguments, "command", NOTE.name)
        note_id = parse_optional_text(arguments, "id", NOTE.name, "").strip()[:64]
        if command == "list":
            return cls(command="list")
        if command == "forget":
            if not note_id:
                raise ToolCallError('Missing required argument "id" for "forget" command in tool call note')
            return cls(command="forget", note_id=note_id)
        if command != "write":
            raise ToolCallError(
                f"Unknown command {command[:100]!r} in tool call note. Use `write`, `forget` or `list`."
            )
        text = require_text(arguments, "text", NOTE.name).strip()
        if not text or len(text) > MAX_NOTE_CHARS:
            raise ToolCallError(f"A note has 1 to {MAX_NOTE_CHARS} characters, not {len(text)}. Write it shorter.")
        return cls(command="write", text=text, keywords=_parse_keywords(arguments.get("keywords")), note_id=note_id)


class NoteObservation(Observation):
    """The result of a `NoteAction`; the content is for the model.

    Attributes:
        written: the note that was written.
        forgotten: the id of the note that was deleted.
    """

    kind: Literal["observation.note"] = "observation.note"
    written: Note | None = None
    forgotten: str = ""


def note_id_of(conversation_id: str, action_id: int) -> str:
    """Return the id of the note that an action writes. It is deterministic."""
    return sha256(f"{conversation_id}:{action_id}".encode()).hexdigest()[:ID_CHARS]


def sort_notes(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes in the order of their creation."""
    return tuple(sorted(notes, key=lambda note: (note.written.timestamp() if note.written else 0.0, note.id)))


def recall_notes(notes: Sequence[Note], text: str, *, is_first: bool) -> tuple[Note, ...]:
    """Return the notes that a message recalls, in the order of their creation.

    Args:
        is_first: the message is the first of a conversation. It also recalls the notes without keywords, the newest
            first, up to `MAX_RECALLED_CHARS`.
    """
    found: list[Note] = []
    left = MAX_RECALLED_CHARS
    text = text.lower()
    for note in reversed(sort_notes(notes)):
        if note.keywords:
            is_meant = bool(find_trigger(note.keywords, text))
        else:
            is_meant = is_first and left >= len(note.text)
            left -= len(note.text) if is_meant else 0
        if is_meant:
            found.append(note)
    return tuple(reversed(found))


def render_notes(notes: Iterable[Note]) -> str:
    """Return notes as text for the model, one per line."""
    lines = []
    for note in sort_notes(notes):
        day = f" ({note.written:%Y-%m-%d})" if note.written else ""
        words = f" [when {', '.join(note.keywords)} is mentioned]" if note.keywords else ""
        lines.append(f"- {note.id}{day}{words}: {note.text}")
    return "\n".join(lines)


def _parse_keywords(given: Any) -> tuple[str, ...]:
    words = [given] if isinstance(given, str) else given or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ToolCallError("Invalid format for 'keywords' in tool call note: use a list of words.")
    found = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if len(found) > MAX_KEYWORDS or any(len(word) > MAX_KEYWORD_CHARS for word in found):
        raise ToolCallError(f"A note may have {MAX_KEYWORDS} keywords of {MAX_KEYWORD_CHARS} characters.")
    return found
