"""The notebooks of private runs: one file per user and project, in the home directory.

A run has its own store. The notebook is copied into it when the run starts, and each later event about notes is applied
to the file.

Holds: applying an event twice is harmless; an old log does not bring back a forgotten note; several runs may write at
once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError

from broker.contract import MAX_NOTES, Event, MemorySpec, Note, NotebookKey, NoteObservation, sort_notes
from broker.coordination import FULL_MESSAGE, FULL_REMEDY, Notebooks
from broker.runtime import UsageError

MARK = "+"
"""Ends every name of a folder or file, so that none is empty or leads elsewhere; no user or project has it."""
SUFFIX = f"{MARK}.json"
MAX_FORGOTTEN = 1_000


class _NotebookContent(BaseModel):
    notes: dict[str, Note] = {}
    forgotten: list[str] = []


class NotebookFile:
    """One notebook."""

    def __init__(self, folder: Path, memory: MemorySpec) -> None:
        self._path = folder / f"{memory.user}{MARK}" / f"{memory.project}{SUFFIX}"

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes in the order in which they were written.

        Raises:
            UsageError: the file cannot be read.
        """
        return sort_notes(self._read().notes.values())

    def write(self, note: Note) -> None:
        """Add a note, or replace the one with its id, unless it was forgotten. Idempotent.

        Raises:
            UsageError: the notebook is full, or cannot be written.
        """
        with self._edit() as content:
            if note.id in content.forgotten:
                return
            if len(content.notes.keys() | {note.id}) > MAX_NOTES:
                raise UsageError(FULL_MESSAGE.format(limit=MAX_NOTES), remedy=FULL_REMEDY)
            content.notes[note.id] = note

    def forget(self, note_id: str) -> bool:
        """Remove a note permanently; return False if there is none with this id."""
        with self._edit() as content:
            content.forgotten.append(note_id)
            return content.notes.pop(note_id, None) is not None

    def erase(self) -> None:
        """Remove all notes permanently."""
        with self._edit() as content:
            content.forgotten += content.notes
            content.notes.clear()

    def apply_event(self, event: Event) -> None:
        """Apply an event about notes; other events are ignored. Idempotent."""
        if isinstance(event, NoteObservation):
            if event.forgotten:
                self.forget(event.forgotten)
            if event.written is not None:
                self.write(event.written)

    async def copy_to(self, notebooks: Notebooks, notebook: NotebookKey) -> None:
        """Replace a store's notebook with a copy of this one."""
        await notebooks.erase(notebook)
        for note in self.notes:
            await notebooks.write(notebook, note)

    def _read(self) -> _NotebookContent:
        try:
            return _NotebookContent.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _NotebookContent()
        except OSError as error:
            raise UsageError(f"The notes in {self._path} cannot be read: {error.strerror}.") from error
        except ValidationError as error:
            raise UsageError(f"The file {self._path} holds no notes.", remedy="Move it away.") from error

    @contextmanager
    def _edit(self) -> Iterator[_NotebookContent]:
        """Yield the content for changes, and write it atomically unless an error is raised."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"The notes in {self._path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._read()
            yield content
            content.forgotten = list(dict.fromkeys(content.forgotten))[-MAX_FORGOTTEN:]
            draft = self._path.with_suffix(".new")
            draft.touch(mode=0o600)
            draft.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
            draft.replace(self._path)
        finally:
            os.close(lock)


def list_notebooks(folder: Path) -> Mapping[NotebookKey, int]:
    """Return every notebook in a folder and its number of notes, sorted.

    Raises:
        UsageError: a notebook cannot be read.
    """
    found = {}
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        user = path.parent.name.removesuffix(MARK)
        project = path.name.removesuffix(SUFFIX)
        notes = NotebookFile(folder, MemorySpec(user=user, project=project)).notes
        found[NotebookKey("", user, project)] = len(notes)
    return found
