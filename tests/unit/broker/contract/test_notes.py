"""Which notes a message recalls, and how a model reads them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker.contract.notes import MAX_RECALLED_CHARS, Note, note_id_of, recall_notes, render_notes

START = datetime(2026, 3, 1, tzinfo=UTC)


def note(number: int, text: str = "", *keywords: str) -> Note:
    return Note(id=f"n{number}", text=text or f"note {number}", keywords=keywords, written=START + timedelta(number))


def test_when_there_is_too_much_the_latest_count() -> None:
    notes = tuple(note(n, f"{n} " + "x" * 900) for n in range(40))
    found = recall_notes(notes, "", is_first=True)
    assert found == notes[-len(found) :]
    assert MAX_RECALLED_CHARS - 1_000 < sum(len(each.text) for each in found) <= MAX_RECALLED_CHARS
    assert recall_notes(found, "", is_first=True) == found


def test_a_list_names_id_day_and_keywords() -> None:
    lines = render_notes((note(2, "Use make.", "build", "test"), Note(id="p", text="Be brief.")))
    assert lines == "- p: Be brief.\n- n2 (2026-03-03) [when build, test is mentioned]: Use make."


def test_an_action_always_writes_under_the_same_id() -> None:
    assert note_id_of("c1", 7) == note_id_of("c1", 7)
    assert len({note_id_of("c1", 7), note_id_of("c1", 8), note_id_of("c2", 7)}) == 3
