"""The /etc of programs in a sandbox, and when their home and /tmp are directories and not memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Enclosure
from tool_worker.sandbox.system_files import NETWORK_FILES, OWN_FILES, EtcCopies, make_etc_copy


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
    copy = make_etc_copy(tmp_path / "files", machine)
    named = {"ssl/certs/one.pem", "ssl/certs/two.pem", "localtime", "os-release"}
    assert entries(copy) == named | set(OWN_FILES) | set(NETWORK_FILES)
    assert (copy / "localtime").read_text() == "here"
    assert (copy / "ssl/certs/two.pem").readlink() == Path("/usr/share/two.pem")
    assert (copy / "resolv.conf").read_text() == ""
    assert "the machine's" not in (copy / "passwd").read_text()


def test_copy_is_made_once_and_again_after_a_change(tmp_path: Path, machine: Path) -> None:
    files = tmp_path / "files"
    first = make_etc_copy(files, machine)
    made = first.stat().st_ino
    assert make_etc_copy(files, machine) == first
    assert first.stat().st_ino == made
    (machine / "ssl" / "certs" / "one.pem").write_text("renewed")
    second = make_etc_copy(files, machine)
    assert second != first
    assert (first / "ssl/certs/one.pem").read_text() == "one"
    assert (second / "ssl/certs/one.pem").read_text() == "renewed"
    (machine / "zone").write_text("elsewhere")
    assert (make_etc_copy(files, machine) / "localtime").read_text() == "elsewhere"
    assert not [path for path in files.iterdir() if path.name.startswith(".")]


def test_special_files_are_not_copied(tmp_path: Path, machine: Path) -> None:
    os.mkfifo(machine / "ssl" / "certs" / "pipe")
    copy = make_etc_copy(tmp_path / "files", machine)
    assert "ssl/certs/pipe" not in entries(copy)


def test_files_that_are_not_world_readable_are_not_copied(tmp_path: Path, machine: Path) -> None:
    (machine / "ssl" / "certs" / "with-key.pem").write_text("key")
    (machine / "ssl" / "certs" / "with-key.pem").chmod(0o640)
    (machine / "ssl" / "certs" / "closed").mkdir()
    (machine / "ssl" / "certs" / "closed" / "three.pem").write_text("three")
    (machine / "ssl" / "certs" / "closed").chmod(0o700)
    (machine / "os-release").chmod(0o600)
    named = {"ssl/certs/one.pem", "ssl/certs/two.pem", "localtime"}
    assert entries(make_etc_copy(tmp_path / "files", machine)) == named | set(OWN_FILES) | set(NETWORK_FILES)


@pytest.mark.parametrize("is_gone", [True, False])
def test_file_changed_during_the_copy_is_copied_again(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    copy2 = shutil.copy2

    def late(source: Path, target: Path) -> Path:
        monkeypatch.setattr(shutil, "copy2", copy2)
        if is_gone:
            (machine / "zone").unlink()
            return copy2(source, target)
        copied = copy2(source, target)
        (machine / "zone").write_text("elsewhere")
        return copied

    monkeypatch.setattr(shutil, "copy2", late)
    copy = make_etc_copy(tmp_path / "files", machine)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [copy.name]
    if is_gone:
        assert not (copy / "localtime").exists()
    else:
        assert (copy / "localtime").read_text() == "elsewhere"


def test_sandboxes_start_with_what_the_machine_has_then(tmp_path: Path, machine: Path) -> None:
    inner = machine / "ssl" / "certs" / "java"
    inner.mkdir()
    (inner / "all").write_text("all")
    copies = EtcCopies(tmp_path / "files", machine)
    first = copies.current()
    assert copies.current() == first
    (inner / "new").write_text("renewed")
    (inner / "new").rename(inner / "all")
    second = copies.current()
    assert (second / "ssl/certs/java/all").read_text() == "renewed"
    (machine / "localtime").unlink()
    third = copies.current()
    assert (second / "localtime").exists()
    assert not (third / "localtime").exists()
    shutil.rmtree(third)
    assert copies.current() == third
    assert entries(third) >= set(OWN_FILES)


def test_copies_of_an_earlier_boot_are_removed(tmp_path: Path, machine: Path) -> None:
    files = tmp_path / "files"
    for name in ("etc-00000000-0123456789abcdef", ".etc-00000000-0123456789abcdef", "others"):
        (files / name).mkdir(parents=True)
    first = make_etc_copy(files, machine)
    (machine / "zone").write_text("elsewhere")
    second = make_etc_copy(files, machine)
    assert {path.name for path in files.iterdir()} == {"others", first.name, second.name}


def test_one_of_two_concurrent_copies_is_taken(tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "files"
    rename = Path.rename

    def other_was_first(draft: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        make_etc_copy(files, machine)
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", other_was_first)
    copy = make_etc_copy(files, machine)
    assert entries(copy) >= set(OWN_FILES)
    assert [path.name for path in files.iterdir()] == [copy.name]


def test_obstacle_to_a_copy_is_reported_in_one_line(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'"), ("c", "d", "the same")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: 'a' -> 'b'$"):
        make_etc_copy(tmp_path / "files", machine)
    assert list((tmp_path / "files").iterdir()) == []


def test_failed_copy_is_an_error_and_leaves_nothing(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(draft: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        make_etc_copy(tmp_path / "files", machine)
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("mount_at", "read_only", "home", "temporary"),
    [
        ("/workspace", (), True, True),
        ("/tmp/a/project", (), True, False),
        ("/home/agent/project", (), False, True),
        ("/workspace", ("/tmp/a/tools",), True, False),
        ("/srv/project", ("/opt/tools",), True, True),
    ],
)
def test_nothing_is_mounted_below_what_an_agent_has_left(
    tmp_path: Path, mount_at: str, read_only: tuple[str, ...], home: bool, temporary: bool
) -> None:
    """A link in the place of a directory on the way to the mount point would lead bwrap out of the sandbox."""
    enclosure = Enclosure(tmp_path, mount_at, is_own=True, read_only=tuple(map(Path, read_only)))
    sandbox = BubblewrapSandbox(tmp_path)
    assert (sandbox.keeps_home(enclosure), sandbox.keeps_temporary(enclosure)) == (home, temporary)


def test_document_readers_are_shown_at_a_path_of_their_own(tmp_path: Path) -> None:
    """At the machine's path they would take the place of /tmp, where a checkout below it has them."""
    options = [*BubblewrapSandbox(tmp_path).options(Enclosure(tmp_path, "/workspace"))]
    at = options.index(f"{BubblewrapSandbox.packages_at}/pypdf")
    assert options[at - 2] == "--ro-bind"
    assert options.count(options[at - 1]) == 1
