"""The script that saves the progress of long work, in real folders and repositories."""

from __future__ import annotations

import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from broker.contract.long_work import (
    FEATURES_FILE,
    INIT_SCRIPT,
    NOTES_FILE,
    SaveProgressAction,
    SaveProgressObservation,
)
from tool_worker.tools.long_work import SaveProgress, make_save_command

GIT = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@localhost", "GIT_COMMITTER_NAME": "a"}
ENVIRONMENT = {**GIT, "GIT_COMMITTER_EMAIL": "a@localhost", "PATH": "/usr/bin:/bin"}
TEXT = '[{"id": "a"}]\n'


def save(folder: Path, **fields: Any) -> SaveProgressObservation:
    action = SaveProgressAction(**{"features": TEXT, "message": "Save", **fields})
    command = ["/bin/bash", "-c", make_save_command(action)]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    result = {"content": done.stdout, "state": "completed", "metadata": {"exit_code": 0}}
    observation = SaveProgress().observe(action, result)
    assert isinstance(observation, SaveProgressObservation)
    return observation


def git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(folder), *arguments], text=True, env=ENVIRONMENT)


def test_progress_is_committed_and_the_commit_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    saved = save(tmp_path)
    assert (saved.content, saved.was_edited) == ("", False)
    assert saved.commit == git(tmp_path, "rev-parse", "HEAD").strip()
    assert git(tmp_path, "show", "--format=%s", "--name-only").split() == ["Save", FEATURES_FILE, "a.py"]
    again = save(tmp_path, written_sha256=sha256(TEXT.encode()).hexdigest())
    assert (again.commit, again.was_edited) == (saved.commit, False)  # nothing is new


def test_only_the_workspace_of_a_larger_repository_is_committed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "other.py").write_text("1")
    git(tmp_path, "add", "other.py")
    (tmp_path / "part").mkdir()
    save(tmp_path / "part")
    assert git(tmp_path, "show", "--format=", "--name-only").split() == [f"part/{FEATURES_FILE}"]


@pytest.mark.parametrize("way", ["edited", "deleted", "linked", "folder linked", "a folder"])
def test_any_other_file_is_replaced_and_reported(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "features.json").write_text("keep")
    save(folder)
    file = folder / FEATURES_FILE
    if way == "edited":
        file.write_text(TEXT.replace("a", "b"))
    elif way == "folder linked":
        file.unlink()
        file.parent.rmdir()
        file.parent.symlink_to(outside)
    else:
        file.unlink()
    if way == "linked":
        file.symlink_to(outside / "features.json")
    if way == "a folder":
        file.mkdir()
    assert save(folder, written_sha256=sha256(TEXT.encode()).hexdigest()).was_edited
    assert file.read_text() == TEXT
    assert not file.is_symlink()
    assert (outside / "features.json").read_text() == "keep"


def test_list_that_a_repository_brings_along_is_reported(tmp_path: Path) -> None:
    file = tmp_path / FEATURES_FILE
    file.parent.mkdir()
    file.write_text("[]")
    assert not save(tmp_path, features="").was_edited  # there is no list yet, and the agent may read this one
    assert file.read_text() == "[]"
    assert save(tmp_path).was_edited


@pytest.mark.parametrize("broken", ["hook", "lock"])
def test_commit_that_fails_is_reported(tmp_path: Path, broken: str) -> None:
    git(tmp_path, "init", "-q")
    if broken == "hook":
        hook = tmp_path / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\necho tidy up first\nexit 1\n")
        hook.chmod(0o755)
    else:
        (tmp_path / ".git" / "index.lock").touch()
    saved = save(tmp_path)
    assert saved.commit == ""
    assert saved.content.startswith("The progress could not be committed:\n")
    assert ("tidy up first" if broken == "hook" else "index.lock") in saved.content
    assert (tmp_path / FEATURES_FILE).read_text() == TEXT


def test_new_context_reads_notes_commits_and_the_init_script(tmp_path: Path) -> None:
    empty = save(tmp_path, features="", message="", report="Context 1.")
    assert empty.content.startswith("Context 1.\n\n# Progress notes")
    assert empty.content.count("There are none yet.") == 2
    assert "There is no such script yet." in empty.content
    assert not (tmp_path / ".git").exists()
    (tmp_path / ".deckhands").mkdir()
    (tmp_path / NOTES_FILE).write_text("yes 0 forged\nnext: the parser")
    (tmp_path / INIT_SCRIPT).write_text("echo ready; exit 3")
    found = save(tmp_path, report="Context 2.", message="Plan")
    assert "next: the parser" in found.content
    assert "Plan" in found.content
    assert f"ready\n[{INIT_SCRIPT} ended with exit code 3]" in found.content
    assert (found.was_edited, len(found.commit)) == (False, 40)
