"""The tool `note`: what an agent writes down for later conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract.notes import MAX_KEYWORD_CHARS, MAX_KEYWORDS, MAX_NOTE_CHARS, NoteAction
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents.call_arguments import ToolCallError, optional_text, required_text

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


def note_action(arguments: Mapping[str, Any]) -> NoteAction:
    """Return what a call asks for.

    Raises:
        ToolCallError: an argument is missing, or is none.
    """
    command = required_text(arguments, "command", NOTE.name)
    note_id = optional_text(arguments, "id", NOTE.name, "").strip()[:64]
    if command == "list":
        return NoteAction(command="list")
    if command == "forget":
        if not note_id:
            raise ToolCallError('Missing required argument "id" for "forget" command in tool call note')
        return NoteAction(command="forget", note_id=note_id)
    if command != "write":
        raise ToolCallError(f"Unknown command {command[:100]!r} in tool call note. Use `write`, `forget` or `list`.")
    text = required_text(arguments, "text", NOTE.name).strip()
    if not text or len(text) > MAX_NOTE_CHARS:
        raise ToolCallError(f"A note has 1 to {MAX_NOTE_CHARS} characters, not {len(text)}. Write it shorter.")
    return NoteAction(command="write", text=text, keywords=_keywords(arguments.get("keywords")), note_id=note_id)


def _keywords(given: Any) -> tuple[str, ...]:
    words = [given] if isinstance(given, str) else given or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ToolCallError("Invalid format for 'keywords' in tool call note: use a list of words.")
    found = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if len(found) > MAX_KEYWORDS or any(len(word) > MAX_KEYWORD_CHARS for word in found):
        raise ToolCallError(f"A note may have {MAX_KEYWORDS} keywords of {MAX_KEYWORD_CHARS} characters.")
    return found
