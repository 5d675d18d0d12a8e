"""The notebooks of a store: notes by tenant, user and project.

Holds: a notebook has at most `MAX_NOTES` notes, even with concurrent writers. Writing and removing are idempotent. The
caller masks the notes.
Keys: `deck:{0}:notes:<tenant>/<user>/<project>`, `deck:{0}:notebooks`.
"""

from __future__ import annotations

import re
from dataclasses import fields

from pydantic import ValidationError

from broker.contract import MAX_NOTES, NAME_PATTERN, Note, NotebookKey, sort_notes
from broker.runtime import UsageError
from broker.store import ShardKeys, Store

FULL_MESSAGE = "The notebook is full: it holds {limit} notes."
FULL_REMEDY = "Forget notes that are out of date, or write several as one."


class Notebooks:
    """The notebooks of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = ShardKeys(0)

    async def read(self, notebook: NotebookKey) -> tuple[Note, ...]:
        """Return the notes in the order in which they were written. Notes of a newer version are left out."""
        flat = await self._store.call("HGETALL", self._key(notebook))
        found = []
        for text in flat[1::2]:
            try:
                found.append(Note.model_validate_json(text))
            except ValidationError:
                continue
        return sort_notes(found)

    async def write(self, notebook: NotebookKey, note: Note) -> None:
        """Add a note, or replace the one with its id. Idempotent.

        Raises:
            UsageError: the notebook is full.
        """
        keys = (self._key(notebook), self._keys.root)
        arguments = (_render_name(notebook), note.id, note.model_dump_json(), MAX_NOTES)
        (outcome,) = await self._store.call_function("deck_write_note", keys, *arguments)
        if outcome == "full":
            raise UsageError(FULL_MESSAGE.format(limit=MAX_NOTES), remedy=FULL_REMEDY)

    async def remove(self, notebook: NotebookKey, note_id: str) -> bool:
        """Remove a note. Returns False if there is none with this id."""
        key = self._key(notebook)
        return bool(await self._store.call("HDEL", key, note_id))

    async def erase(self, notebook: NotebookKey) -> None:
        """Remove all notes and the notebook itself. Idempotent."""
        key, name = self._key(notebook), _render_name(notebook)
        # In this order, a note that is written meanwhile is in a listed notebook.
        commands = [("SREM", self._keys.notebooks, name), ("DEL", key)]
        await self._store.call_many(commands)

    async def count_notes(self) -> dict[NotebookKey, int]:
        """Return every notebook with its number of notes, sorted. A notebook with an unreadable name is left out."""
        names = await self._store.call("SMEMBERS", self._keys.notebooks)
        parts = (name.decode(errors="backslashreplace").split("/") for name in names)
        repositories = sorted(NotebookKey(*three) for three in parts if _are_names(three))
        commands = [("HLEN", self._key(repository)) for repository in repositories]
        counts = await self._store.call_many(commands)
        return {repository: int(count) for repository, count in zip(repositories, counts, strict=True)}

    def _key(self, notebook: NotebookKey) -> str:
        return self._keys.notes(_render_name(notebook))


def _render_name(notebook: NotebookKey) -> str:
    return f"{notebook.tenant}/{notebook.user}/{notebook.project}"


def _are_names(parts: list[str]) -> bool:
    return len(parts) == len(fields(NotebookKey)) and all(re.match(NAME_PATTERN, part) for part in parts)
