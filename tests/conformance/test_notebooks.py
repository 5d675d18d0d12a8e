"""Notebooks in the store: kept apart, bounded, erased."""

from __future__ import annotations

import asyncio

import pytest

from broker.contract.notes import MAX_NOTES, Note, NotebookKey
from broker.coordination.notebooks import Notebooks
from broker.runtime.errors import UsageError
from broker.store.store import Store

MINE = NotebookKey("", "ada", "engine")
OTHERS = (NotebookKey("acme", "ada", "engine"), NotebookKey("", "", "engine"), NotebookKey("", "ada", ""))


async def test_a_note_is_written_replaced_and_forgotten(store: Store) -> None:
    books = Notebooks(store)
    await books.write(MINE, Note(id="a", text="old"))
    await books.write(MINE, Note(id="a", text="new", keywords=("x",)))
    await books.write(MINE, Note(id="b", text="other"))
    assert await books.read(MINE) == (Note(id="a", text="new", keywords=("x",)), Note(id="b", text="other"))
    assert await books.remove(MINE, "a") is True
    assert await books.remove(MINE, "a") is False
    assert await books.read(MINE) == (Note(id="b", text="other"),)


async def test_notes_of_others_are_not_readable(store: Store) -> None:
    books = Notebooks(store)
    await books.write(MINE, Note(id="a", text="mine"))
    for other in OTHERS:
        assert await books.read(other) == ()
        await books.write(other, Note(id="b", text="theirs"))
    assert await books.count_notes() == dict.fromkeys(sorted((MINE, *OTHERS)), 1)
    await books.erase(MINE)
    assert await books.read(MINE) == ()
    assert await books.count_notes() == dict.fromkeys(sorted(OTHERS), 1)


async def test_full_notebook_takes_no_more_under_concurrency(store: Store) -> None:
    books = Notebooks(store)
    notes = [Note(id=f"n{n}", text="x") for n in range(MAX_NOTES + 20)]
    outcomes = await asyncio.gather(*(books.write(MINE, note) for note in notes), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, UsageError)]
    assert len(refused) >= 20
    assert len(await books.read(MINE)) <= MAX_NOTES
    await books.erase(MINE)
    for note in notes[:MAX_NOTES]:
        await books.write(MINE, note)
    with pytest.raises(UsageError, match="holds 200 notes"):
        await books.write(MINE, notes[-1])
    assert len(await books.read(MINE)) == MAX_NOTES


async def test_note_of_a_full_notebook_is_replaced_during_writes(store: Store) -> None:
    books = Notebooks(store)
    notes = [Note(id=f"n{n}", text="x") for n in range(MAX_NOTES)]
    for note in notes:
        await books.write(MINE, note)
    more = [Note(id=f"more{n}", text="x") for n in range(20)]
    again = [note.model_copy(update={"text": "new"}) for note in notes[:20]]
    writes = [books.write(MINE, note) for pair in zip(more, again, strict=True) for note in pair]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UsageError, type(None)] * 20
    found = {note.id: note.text for note in await books.read(MINE)}
    assert found == {note.id: note.text for note in [*notes[20:], *again]}


async def test_notebook_with_an_unreadable_name_is_not_listed(store: Store) -> None:
    books = Notebooks(store)
    await books.write(MINE, Note(id="a", text="x"))
    await store.connection.call("SADD", "deck:{0}:notebooks", "no-name", b"\xff/a/b", "a/b/c/d")
    assert await books.count_notes() == {MINE: 1}


async def test_unreadable_notes_are_left_out(store: Store) -> None:
    books = Notebooks(store)
    await books.write(MINE, Note(id="a", text="x"))
    await store.connection.call("HSET", "deck:{0}:notes:/ada/engine", "b", '{"id": "b", "from": "the future"}')
    assert [note.id for note in await books.read(MINE)] == ["a"]
