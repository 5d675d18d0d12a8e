"""What programs of a sandbox see as /etc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tool_worker.sandbox.system_files import OF_NETWORK, OWN, own_etc


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    machine = tmp_path / "etc"
    (machine / "ssl" / "certs").mkdir(parents=True)
    (machine / "ssl" / "certs" / "one.pem").write_text("one")
    (machine / "ssl" / "certs" / "two.pem").symlink_to("/usr/share/two.pem")
    (machine / "ssl" / "private").mkdir()
    (machine / "zone").write_text("here")
    (machine / "localtime").symlink_to(machine / "zone")
    (machine / "os-release").write_text("NAME=test")
    (machine / "shadow").write_text("root:secret")
    (machine / "passwd").write_text("root:x:0:0:the machine's:/root:/bin/bash")
    (machine / "resolv.conf").write_text("nameserver 10.0.0.1")
    return machine


def entries(copy: Path) -> set[str]:
    return {str(path.relative_to(copy)) for path in copy.rglob("*") if not path.is_dir()}


def test_only_what_programs_need_is_copied(tmp_path: Path, machine: Path) -> None:
    copy = own_etc(tmp_path / "files", machine)
    named = {"ssl/certs/one.pem", "ssl/certs/two.pem", "localtime", "os-release"}
    assert entries(copy) == named | set(OWN) | set(OF_NETWORK)
    assert (copy / "localtime").read_text() == "here"
    assert (copy / "ssl/certs/two.pem").readlink() == Path("/usr/share/two.pem")
    assert (copy / "resolv.conf").read_text() == ""
    assert "the machine's" not in (copy / "passwd").read_text()


def test_a_copy_is_made_once_and_another_when_a_file_has_changed(tmp_path: Path, machine: Path) -> None:
    files = tmp_path / "files"
    first = own_etc(files, machine)
    made = first.stat().st_ino
    assert own_etc(files, machine) == first
    assert first.stat().st_ino == made
    (machine / "ssl" / "certs" / "one.pem").write_text("renewed")
    second = own_etc(files, machine)
    assert second != first
    assert (first / "ssl/certs/one.pem").read_text() == "one"
    assert (second / "ssl/certs/one.pem").read_text() == "renewed"
    (machine / "zone").write_text("elsewhere")
    assert (own_etc(files, machine) / "localtime").read_text() == "elsewhere"
    assert not [path for path in files.iterdir() if path.name.startswith(".")]


def test_what_is_no_file_stays_away(tmp_path: Path, machine: Path) -> None:
    os.mkfifo(machine / "ssl" / "certs" / "pipe")
    copy = own_etc(tmp_path / "files", machine)
    assert "ssl/certs/pipe" not in entries(copy)


def test_of_two_workers_that_make_it_at_once_one_is_taken(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    rename = Path.rename

    def other_was_first(draft: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        own_etc(files, machine)
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", other_was_first)
    copy = own_etc(files, machine)
    assert entries(copy) >= set(OWN)
    assert [path.name for path in files.iterdir()] == [copy.name]


def test_a_copy_that_cannot_be_made_is_an_error_and_leaves_nothing(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(draft: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        own_etc(tmp_path / "files", machine)
    assert list((tmp_path / "files").iterdir()) == []
