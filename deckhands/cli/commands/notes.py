"""`deckhands notes`: read, write and erase the notes of agents for later conversations."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import click
from pydantic import ValidationError

from broker.contract import ID_CHARS, MAX_NOTE_CHARS, NAME_PATTERN, MemorySpec, Note, NotebookKey
from broker.coordination import Notebooks
from broker.runtime import SYSTEM_CLOCK, UsageError, new_key
from deckhands.cli.authorship import author_options, record_operation, refuse_author
from deckhands.cli.command_group import with_options
from deckhands.cli.options import NAME_REMEDY, json_option, parse_memory
from deckhands.client import NotebookFile, cluster_client, list_notebooks, print_json, print_text, render_table
from deckhands.client import note as say
from deckhands.cluster import Home
from deckhands.settings import CliSettings

SECTION = "Budgets, secrets, notes"
SUMMARIES = {"notes": "Show, write and erase the notes that agents keep for later conversations."}


@dataclass(frozen=True, slots=True)
class NotesOptions:
    """Options of `notes`.

    Attributes:
        project: None lists the notebooks.
        text: of the note to write.
        note_id: of the note to erase.
    """

    project: str | None
    user: str
    tenant: str
    text: str | None
    keywords: tuple[str, ...]
    note_id: str | None
    erase: bool
    local: bool
    as_json: bool

    @property
    def changes(self) -> int:
        """How many changes are requested; at most one is allowed."""
        return sum((self.text is not None, self.note_id is not None, self.erase))


@click.command()
@click.argument("project", required=False)
@click.option("--user", default="", help="The user of the notes; by default they are shared.")
@click.option("--tenant", default="", help="The tenant of the cluster.")
@click.option("--write", "text", help="Add a note.")
@click.option(
    "--keyword",
    "keywords",
    multiple=True,
    help="Recall it only when a message mentions this word.",
)
@click.option("--forget", "note_id", metavar="ID", help="Remove one note.")
@click.option("--erase", is_flag=True, help="Remove all notes of the notebook.")
@click.option("--local", is_flag=True, help="Use the notes of `deckhands run` here, even if there is a cluster.")
@json_option
@author_options
@with_options(NotesOptions)
def notes(options: NotesOptions) -> None:
    """Show or change the notes that agents keep about PROJECT. Without PROJECT, list the notebooks."""
    settings = CliSettings.from_env()
    is_local = options.local or (settings.url is None and Home(settings.home).cluster_url is None)
    if options.changes > 1 or (options.changes and options.project is None):
        raise UsageError(
            "The request is incomplete or contradictory.",
            remedy="Name one PROJECT, and one of --write, --forget and --erase.",
        )
    if is_local or not options.changes:
        refuse_author("only changes of a cluster's notes are recorded")
    if is_local and options.tenant:
        raise UsageError("The notes of `deckhands run` have no tenant.", remedy="Leave --tenant out.")
    if options.project is None:
        _show_notebooks(asyncio.run(_count_notes(settings, is_local=is_local)), as_json=options.as_json)
        return
    memory = parse_memory(options.project, options.user)
    if not re.fullmatch(NAME_PATTERN, options.tenant):
        raise UsageError(f"The tenant's name cannot be {options.tenant!r}.", remedy=NAME_REMEDY)
    repository = NotebookKey.of(memory, tenant=options.tenant)
    if not options.changes:
        _show(asyncio.run(_read_notes(settings, memory, repository, is_local=is_local)), as_json=options.as_json)
        return
    say(asyncio.run(_change(settings, memory, repository, options, is_local=is_local)))


def _show_notebooks(books: dict[NotebookKey, int], *, as_json: bool) -> None:
    if as_json:
        for repository, count in books.items():
            print_json(
                {"tenant": repository.tenant, "user": repository.user, "project": repository.project, "notes": count}
            )
        return
    rows = [
        (repository.project or "-", repository.user or "-", repository.tenant or "-", str(count))
        for repository, count in books.items()
    ]
    print_text("\n".join(render_table(("PROJECT", "USER", "TENANT", "NOTES"), rows)))


def _show(found: Sequence[Note], *, as_json: bool) -> None:
    for note in found:
        if as_json:
            print_json(note.model_dump(mode="json"))
            continue
        day = f"{note.written:%Y-%m-%d}" if note.written else "-"
        words = f"  [{', '.join(note.keywords)}]" if note.keywords else ""
        print_text(f"{note.id}  {day}{words}  {note.text}")


async def _count_notes(settings: CliSettings, *, is_local: bool) -> dict[NotebookKey, int]:
    if is_local:
        return dict(list_notebooks(Home(settings.home).notes))
    async with cluster_client(settings) as client:
        return await Notebooks(client.store).count_notes()


async def _read_notes(
    settings: CliSettings, memory: MemorySpec, book: NotebookKey, *, is_local: bool
) -> Sequence[Note]:
    if is_local:
        return NotebookFile(Home(settings.home).notes, memory).notes
    async with cluster_client(settings) as client:
        return await Notebooks(client.store).read(book)


async def _change(
    settings: CliSettings, memory: MemorySpec, book: NotebookKey, options: NotesOptions, *, is_local: bool
) -> str:
    """Make the change, and return a sentence that reports it."""
    note = None if options.text is None else _make_note(options.text, options.keywords)
    note_id = options.note_id
    file = NotebookFile(Home(settings.home).notes, memory)
    if is_local:
        if note is not None:
            file.write(note)
        elif options.erase:
            file.erase()
        else:
            _require_found(file.forget(note_id or ""), note_id)
    else:
        async with cluster_client(settings) as client:
            repositories = Notebooks(client.store)
            if note is not None:
                await repositories.write(book, note)
            elif options.erase:
                await repositories.erase(book)
            else:
                _require_found(await repositories.remove(book, note_id or ""), note_id)
            await record_operation(client, "notes", f"{book.tenant}/{book.user}/{book.project}")
    if note is not None:
        return f"Saved with the id {note.id}."
    return "The notebook is empty." if options.erase else f"The note {note_id} is removed."


def _make_note(text: str, keywords: tuple[str, ...]) -> Note:
    try:
        return Note(id=new_key()[:ID_CHARS], text=text.strip(), keywords=keywords, written=SYSTEM_CLOCK.now())
    except ValidationError as error:
        raise UsageError(
            f"The note has {len(text.strip())} characters.", remedy=f"Use 1 to {MAX_NOTE_CHARS}."
        ) from error


def _require_found(is_found: bool, note_id: str | None) -> None:
    if not is_found:
        raise UsageError(f"There is no note {note_id!r}.", remedy="`deckhands notes PROJECT` lists them.")
