"""`deckhands notes` and `--memory`: notes that outlive a run, shown and erased by a user."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from broker.contract.notes import MAX_NOTES, Note, NoteObservation
from broker.contract.specs import MemorySpec
from broker.runtime.errors import UsageError
from deckhands.client.reading.notebook_file import NotebookFile
from tests.integration.command_line import Done, deckhands, environment
from tests.stores import RealServer, emptied
from tests.turns import call, script


def noting(**arguments: Any) -> dict[str, Any]:
    return call("note", **arguments)


def refused(done: Done, text: str) -> None:
    assert done.code == 2, done
    assert text in done.err
    assert "Traceback" not in done.err


def test_next_run_recalls_notes_of_a_run(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    (tmp_path / "w").mkdir()
    model = script(tmp_path / "m.json", noting(command="write", text="Use make."), noting(command="forget", id="p"))
    NotebookFile(tmp_path / "home" / "notes", MemorySpec(project="engine")).write(Note(id="p", text="Old."))
    run = ["run", "-t", "x", "-w", tmp_path / "w", "--sandbox", "none", "--memory", "engine", "--json"]
    assert deckhands(*run, "--model", model, env=env).code == 0
    (shown,) = deckhands("notes", "engine", "--json", env=env).json
    assert shown["text"] == "Use make."
    assert shown["id"] in deckhands("notes", "engine", env=env).out
    again = deckhands(*run, "--model", script(tmp_path / "n.json"), env=env)
    (recall,) = (event for event in again.json if event.get("kind") == "observation.recall")
    assert [note["text"] for note in recall["notes"]] == ["Use make."]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_person_writes_lists_and_erases(tmp_path: Path, valkey_server: RealServer, is_local: bool) -> None:
    url = {} if is_local else {"DECKHANDS_URL": asyncio.run(emptied(valkey_server.url))}
    env = environment(tmp_path / "home", **url)
    mine = ("engine", "--user", "ada")
    assert deckhands("notes", *mine, "--write", "Be brief.", env=env).code == 0
    deckhands("notes", *mine, "--write", "Ask \x1b[2Jfirst.", "--keyword", "deploy", env=env)
    deckhands("notes", "", "--write", "Other.", env=env)
    assert sorted(deckhands("notes", "--json", env=env).json, key=json.dumps) == [
        {"tenant": "", "user": "", "project": "", "notes": 1},
        {"tenant": "", "user": "ada", "project": "engine", "notes": 2},
    ]
    assert "engine" in deckhands("notes", env=env).out
    brief, ask = deckhands("notes", *mine, "--json", env=env).json
    assert (brief["text"], ask["keywords"]) == ("Be brief.", ["deploy"])
    assert "\x1b" not in deckhands("notes", *mine, env=env).out
    assert deckhands("notes", *mine, "--forget", brief["id"], env=env).code == 0
    refused(deckhands("notes", *mine, "--forget", brief["id"], env=env), "There is no note")
    assert [note["id"] for note in deckhands("notes", *mine, "--json", env=env).json] == [ask["id"]]
    assert deckhands("notes", *mine, "--erase", env=env).code == 0
    assert deckhands("notes", *mine, env=env).out == ""


def test_bad_input(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    refused(deckhands("notes", "a/b", env=env), "A project cannot be called 'a/b'.")
    refused(deckhands("notes", "a", "--user", "b/c", env=env), "A user cannot be called 'b/c'.")
    refused(deckhands("notes", "--write", "x", env=env), "The request is incomplete or contradictory.")
    refused(deckhands("notes", "a", "--write", "x", "--erase", env=env), "incomplete")
    refused(deckhands("notes", "a", "--write", "x" * 1_001, env=env), "The note has 1001 characters.")
    refused(deckhands("notes", "a", "--tenant", "t", env=env), "have no tenant")
    elsewhere = env | {"DECKHANDS_URL": "redis://127.0.0.1:1/0"}
    refused(deckhands("notes", "a", "--tenant", "t/u", env=elsewhere), "The tenant's name cannot be 't/u'.")
    refused(
        deckhands("run", "-t", "x", "--model", "m", "--memory", "a b", env=env), "A project cannot be called 'a b'."
    )
    (tmp_path / "home" / "notes" / "+").mkdir(parents=True)
    (tmp_path / "home" / "notes" / "+" / "a+.json").write_text("[")
    refused(deckhands("notes", "a", env=env), "holds no notes")


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    for user, project in (("..", ".."), ("", ""), (".", "x")):
        NotebookFile(tmp_path / "notes", MemorySpec(user=user, project=project)).write(Note(id="a", text="x"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert len(list((tmp_path / "notes").glob("*/*.json"))) == 3


def test_an_old_log_brings_no_forgotten_note_back(tmp_path: Path) -> None:
    file = NotebookFile(tmp_path, MemorySpec())
    written = NoteObservation(written=Note(id="a", text="x"))
    file.apply_event(written)
    file.apply_event(written)
    assert [note.id for note in file.notes] == ["a"]
    file.apply_event(NoteObservation(forgotten="a"))
    file.apply_event(written)
    assert file.notes == ()


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    file = NotebookFile(tmp_path, MemorySpec())
    for number in range(MAX_NOTES):
        file.write(Note(id=f"n{number}", text="x"))
    with pytest.raises(UsageError, match="holds 200 notes"):
        file.write(Note(id="one more", text="x"))
    file.write(Note(id="n7", text="y"))
    assert len(file.notes) == MAX_NOTES
