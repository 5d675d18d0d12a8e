"""The transcripts of attempts for the report: `transcripts/CONVERSATION.json` in the directory of an evaluation.

Holds: written when the conversation of an attempt has ended; texts are shortened, and so are long conversations.
Does not: replace the log, which `deckhands eval logs` shows whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.contract import Event, truncate_content
from deckhands.evaluation.exports.dialogue import DialogueTurn, to_dialogue

FOLDER = "transcripts"
MAX_TEXT_CHARS, MAX_TURNS = 4_000, 200
FIRST_TURNS = 20
"""How many turns are kept of the start of a long conversation; the rest is of its end."""


class TranscriptTurn(BaseModel):
    """A message of a transcript; `role` is system, user, assistant or tool, and `name` the tool."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: str
    text: str
    name: str = ""
    calls: list[str] = []


class Transcript(BaseModel):
    """The transcript of an attempt; `left_out` is the number of turns missing in its middle."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    task: str = ""
    turns: list[TranscriptTurn] = []
    left_out: int = 0


def write_transcript(directory: Path, conversation_id: str, events: Sequence[Event]) -> None:
    """Write the transcript of a conversation.

    Raises:
        OSError: the file cannot be written.
    """
    dialogue = to_dialogue(conversation_id, events)
    turns = [_shorten(turn) for turn in dialogue.turns if turn.role != "system"]
    left_out = max(0, len(turns) - MAX_TURNS)
    if left_out:
        turns = turns[:FIRST_TURNS] + turns[FIRST_TURNS + left_out :]
    found = Transcript(task=truncate_content(dialogue.task, MAX_TEXT_CHARS), turns=turns, left_out=left_out)
    path = directory / FOLDER / f"{conversation_id}.json"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(found.model_dump_json(), encoding="utf-8")
    draft.replace(path)


def read_transcripts(directory: Path, conversation_ids: Iterable[str], limit_chars: int) -> dict[str, Transcript]:
    """Return the readable transcripts of conversations, up to a total number of characters."""
    found: dict[str, Transcript] = {}
    for conversation_id in conversation_ids:
        if Path(conversation_id).name != conversation_id:  # the rows may come from elsewhere
            continue
        try:
            text = (directory / FOLDER / f"{conversation_id}.json").read_text(encoding="utf-8")
            limit_chars -= len(text)
            if limit_chars < 0:
                break
            found[conversation_id] = Transcript.model_validate_json(text)
        except (OSError, UnicodeDecodeError, ValidationError):
            continue
    return found


def _shorten(turn: DialogueTurn) -> TranscriptTurn:
    calls = [
        truncate_content(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}", MAX_TEXT_CHARS)
        for call in turn.calls
    ]
    text = truncate_content(turn.content, MAX_TEXT_CHARS)
    return TranscriptTurn(role=turn.role, text=text, name=turn.name, calls=calls)
