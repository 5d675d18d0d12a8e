"""Checkpoints of workspaces: whole, safe against what a store may hold, and on another node restored or said to be lost."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import ErrorObservation
from broker.coordination.action_streams import ActionDelivery, ActionReclaimed, ControlDelivery
from broker.coordination.transfers import TransferFailed
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.runtime.settings import BrokerSettings
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.client.forking import build_fork
from deckhands.client.transfers.files import WorkspaceFiles
from deckhands.operations.jobs.cleanup import CheckpointsNotRemoved, remove_checkpoints
from deckhands.operations.jobs.job import JobServices
from tests.archive_parts import begin_ended, retired
from tests.integration.checkpoint_nodes import CID, Node, node, printed, serve
from tests.stores import RealServer, emptied
from tests.trees import cleared, nested, without_rights
from tool_worker.errors import CheckpointCorrupt, CheckpointsUnavailable, SourceUnusable, WorkspaceTooLarge
from tool_worker.workspace.checkpoints.checkpoint_store import (
    PIECE_BYTES,
    Checkpoint,
    Checkpoints,
    SavedFiles,
)
from tool_worker.workspace.checkpoints.checkpointing import LOST
from tool_worker.workspace.checkpoints.removal import CheckpointRemoval
from tool_worker.workspace.files.file_tree import TreeLimits


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/checkpoints"
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def checkpoints(url: str) -> Checkpoints:
    return Checkpoints(url, SystemClock())


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace with something of everything."""
    path = tmp_path / "workspace"
    (path / "src" / "deep").mkdir(parents=True)
    (path / "src" / "a.py").write_text("print('a')\n")
    (path / "src" / "deep" / "empty").touch()
    (path / "run.sh").write_text("#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    (path / "binary").write_bytes(bytes(range(256)) * 100)
    (path / "link").symlink_to("src/a.py")
    (path / "away").symlink_to("/etc/passwd")
    (path / "nowhere").symlink_to("gone")
    (path / "naïve name\n").write_text("x")
    Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe")).write_text("y")
    os.mkfifo(path / "fifo")
    (path / "locked").mkdir()
    (path / "locked" / "file").write_text("z")
    (path / "locked").chmod(0o555)
    for found in [path / "src" / "a.py", path / "binary"]:
        os.utime(found, ns=(1_700_000_000_123_456_789, 1_600_000_000_987_654_321))
    return path


def content(path: Path) -> dict[str, object]:
    """Return the part of a tree that a checkpoint should keep."""
    found: dict[str, object] = {}
    for entry in sorted(path.rglob("*")):
        status, name = entry.lstat(), str(entry.relative_to(path))
        if stat.S_ISLNK(status.st_mode):
            found[name] = ("link", str(entry.readlink()))
        elif stat.S_ISDIR(status.st_mode):
            found[name] = ("directory", stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        elif stat.S_ISREG(status.st_mode):
            found[name] = (entry.read_bytes(), stat.S_IMODE(status.st_mode), status.st_mtime_ns)
    return found


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """Let the kernel give this process no more of something."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


class Moody(MemoryFileSystem):
    """A place whose client raises its own errors."""

    protocol = "moody"
    moods: ClassVar[set[str]] = set()

    def exists(self, path: str, **options: Any) -> bool:
        if "down" in self.moods:
            raise RuntimeError("no credentials")
        return super().exists(path, **options)

    def modified(self, path: str) -> Any:
        if "down" in self.moods:
            raise RuntimeError("no credentials")
        return super().modified(path)


def test_restored_files_equal_saved_ones(checkpoints: Checkpoints, workspace: Path, tmp_path: Path) -> None:
    assert not checkpoints.has("conversation")
    with pytest.raises(FileNotFoundError):
        checkpoints.restore("conversation", tmp_path / "restored")
    saved = checkpoints.save("conversation", workspace, SavedFiles())
    assert checkpoints.has("conversation")
    assert (saved.files, saved.size_bytes) == (13, saved.read_bytes)
    restored = checkpoints.restore("conversation", tmp_path / "elsewhere" / "restored")
    assert (restored.files, restored.size_bytes) == (saved.files, saved.size_bytes)
    assert content(tmp_path / "elsewhere" / "restored") == content(workspace)
    with pytest.raises(FileExistsError):
        checkpoints.restore("conversation", tmp_path / "elsewhere" / "restored")


def test_files_closed_by_their_owner_are_saved_and_stay_closed(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with without_rights(own):
        workspace = own / "workspace"
        (workspace / "a" / "b").mkdir(parents=True)
        (workspace / "a" / "b" / "file").write_text("closed")
        (workspace / "locked").mkdir()
        (workspace / "written").write_text("only written")
        modes = {"a/b/file": 0, "a/b": 0o300, "a": 0o400, "locked": 0, "written": 0o200}
        for name, mode in modes.items():
            (workspace / name).chmod(mode)
        checkpoints = Checkpoints(f"file://{own}/checkpoints", SystemClock())
        assert checkpoints.save("conversation", workspace, SavedFiles()).files == len(modes)
        checkpoints.restore("conversation", own / "restored")
        for top in (workspace, own / "restored"):
            for name in reversed(modes):
                path = top / name
                assert path.lstat().st_mode & 0o777 == modes[name]
                path.chmod(0o700)
            assert (top / "a" / "b" / "file").read_text() == "closed"
            assert (top / "written").read_text() == "only written"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be two people")
def test_files_closed_by_others_are_not_silently_omitted(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "workspace" / "others").mkdir(parents=True, mode=0o700)
    (own / "workspace" / "others").chmod(0o700)
    with without_rights(own):
        (own / "checkpoints").mkdir()
        checkpoints = Checkpoints(f"file://{own}/checkpoints", SystemClock())
        with pytest.raises(PermissionError, match="others"):
            checkpoints.save("conversation", own / "workspace", SavedFiles())
        assert not checkpoints.has("conversation")


def test_however_deep_it_is_nothing_is_left_out_unawares(tmp_path: Path) -> None:
    workspace, top = tmp_path / "workspace", tmp_path / "restored"
    workspace.mkdir()
    checkpoints = Checkpoints(f"file://{tmp_path}/checkpoints", SystemClock())
    with nested(workspace, 1500):
        deep = "/".join(["d"] * 1500)
        (workspace / deep / "file").write_text("deep")
        assert checkpoints.save("conversation", workspace, SavedFiles()).files == 1501
        with cleared(top):
            checkpoints.restore("conversation", top)
            assert (top / deep / "file").read_text() == "deep"
        (workspace / deep / ("long" * 30)).mkdir()
        with pytest.raises(WorkspaceTooLarge, match="paths of more than 3,072 bytes"):
            checkpoints.save("conversation", workspace, SavedFiles())


def test_concurrent_restores_take_one_result(
    checkpoints: Checkpoints, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, target = Path.rename, tmp_path / "node" / "workspace"

    def other_was_first(draft: Path, place: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        checkpoints.restore("conversation", target)
        (target / "since").touch()
        return rename(draft, place)

    checkpoints.save("conversation", workspace, SavedFiles())
    monkeypatch.setattr(Path, "rename", other_was_first)
    with pytest.raises(FileExistsError):
        checkpoints.restore("conversation", target)
    assert (target / "since").exists()
    assert [path.name for path in target.parent.iterdir()] == ["workspace"]


def test_part_of_a_kept_checkpoint_equals_what_was_saved(
    checkpoints: Checkpoints, workspace: Path, tmp_path: Path
) -> None:
    saved = content(workspace)
    checkpoints.save("conversation", workspace, SavedFiles(), event=4)
    (workspace / "src" / "a.py").write_text("changed")
    checkpoints.save("conversation", workspace, SavedFiles(), event=9)
    assert checkpoints.list_events("conversation") == [4, 9]
    listed = checkpoints.list_files("conversation", 4, ".")
    assert [entry.name for entry in listed] == sorted(name for name in saved if "/" not in name)
    assert [entry[:2] for entry in checkpoints.list_files("conversation", 4, "src/deep/")] == [("empty", "file")]
    for path in ("src", "locked", "away", "src/a.py", "."):
        target = tmp_path / f"part-{path.replace('/', '-')}"
        target.mkdir()
        checkpoints.extract("conversation", 4, path, target, limits=TreeLimits())
        wanted = {name: kept for name, kept in saved.items() if path == "." or f"{name}/".startswith(f"{path}/")}
        found = content(target)
        assert {name: found[name] for name in wanted} == wanted
        assert found.keys() - wanted.keys() <= {"src"}, path
    (tmp_path / "none").mkdir()
    for path in ("away/passwd", "../x", "src/a", "/etc", "deep"):
        with pytest.raises(FileNotFoundError):
            checkpoints.extract("conversation", 4, path, tmp_path / "none", limits=TreeLimits())
        with pytest.raises(FileNotFoundError):
            checkpoints.list_files("conversation", 4, path)
    with pytest.raises(NotADirectoryError):
        checkpoints.list_files("conversation", 4, "src/a.py")
    with pytest.raises(SourceUnusable, match="after event 5"):
        checkpoints.list_files("conversation", 5, ".")
    for limits in (TreeLimits(files=1), TreeLimits(bytes=100)):
        with pytest.raises(WorkspaceTooLarge, match="has more than"):
            checkpoints.extract("conversation", 4, ".", tmp_path / "none", limits=limits)
    assert not any((tmp_path / "none").iterdir())


def test_only_what_changed_is_read_and_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    workspace, known = tmp_path / "workspace", SavedFiles()
    workspace.mkdir()
    for number in range(20):
        (workspace / f"file-{number}").write_text(f"content {number}\n" * 1000)
    while len(known.pieces) < 20:  # files that are too young are read again
        checkpoints.save("conversation", workspace, known)
    again = checkpoints.save("conversation", workspace, known)
    assert again.read_bytes == 0
    (workspace / "file-7").write_text("changed")
    (workspace / "file-8").unlink()
    (workspace / "copy").write_bytes((workspace / "file-9").read_bytes())
    changed = checkpoints.save("conversation", workspace, known)
    assert changed.read_bytes == len("changed") + (workspace / "copy").stat().st_size
    assert changed.written_bytes < 2_000
    checkpoints.restore("conversation", tmp_path / "restored")
    assert content(tmp_path / "restored") == content(workspace)


def test_a_change_that_keeps_size_and_time_is_seen(checkpoints: Checkpoints, tmp_path: Path) -> None:
    workspace, known = tmp_path / "workspace", SavedFiles()
    workspace.mkdir()
    (workspace / "file").write_text("one")
    status = (workspace / "file").stat()
    while not known.pieces:
        checkpoints.save("conversation", workspace, known)
    (workspace / "file").write_text("two")
    os.utime(workspace / "file", ns=(status.st_atime_ns, status.st_mtime_ns))
    checkpoints.save("conversation", workspace, known)
    checkpoints.restore("conversation", tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_text() == "two"


def test_large_files_are_saved_in_pieces(checkpoints: Checkpoints, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    text = bytes(range(256)) * (PIECE_BYTES // 256) + b"tail"
    (workspace / "big").write_bytes(text)
    checkpoints.save("conversation", workspace, SavedFiles())
    checkpoints.restore("conversation", tmp_path / "restored")
    assert (tmp_path / "restored" / "big").read_bytes() == text


def test_unneeded_checkpoints_are_dropped(checkpoints: Checkpoints, url: str, tmp_path: Path) -> None:
    removal = CheckpointRemoval(url, SystemClock())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shared").write_text("shared")
        (tmp_path / name / "own").write_text(name)
        checkpoints.save(name, tmp_path / name, SavedFiles())
    assert removal.drop_unused() == 0
    assert removal.list_conversations() == ["one", "two"]
    removal.forget_all("one")
    removal.forget_all("one")
    assert removal.list_conversations() == ["two"]
    assert removal.drop_unused(older_than_seconds=3600) == 0
    assert not checkpoints.has("one")
    assert removal.drop_unused() == 1
    checkpoints.restore("two", tmp_path / "restored")
    assert content(tmp_path / "restored") == content(tmp_path / "two")


def test_old_piece_is_written_again_when_named_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/place", SystemClock())
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("content")
    checkpoints.save("one", tmp_path / "work", SavedFiles())
    (piece,) = [path for path in (tmp_path / "place" / "objects").rglob("*") if path.is_file()]
    first = piece.stat().st_mtime_ns
    checkpoints.save("two", tmp_path / "work", SavedFiles())
    assert piece.stat().st_mtime_ns == first
    os.utime(piece, (0, 0))
    removal = CheckpointRemoval(f"file://{tmp_path}/place", SystemClock())
    assert removal.drop_unused(older_than_seconds=3600) == 0  # it is named
    checkpoints.save("three", tmp_path / "work", SavedFiles())
    assert piece.stat().st_mtime_ns > first
    for name in ("one", "two", "three"):
        removal.forget_all(name)
    assert removal.drop_unused(older_than_seconds=3600) == 0  # it is young again
    os.utime(piece, (0, 0))
    assert removal.drop_unused(older_than_seconds=3600) == 1


@pytest.mark.parametrize("limits", [TreeLimits(files=5), TreeLimits(bytes=1000)])
def test_beyond_its_limits_the_last_checkpoint_stays(
    url: str, workspace: Path, tmp_path: Path, limits: TreeLimits
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "file").write_text("small")
    checkpoints = Checkpoints(url, SystemClock(), limits=limits)
    checkpoints.save("conversation", small, SavedFiles())
    with pytest.raises(WorkspaceTooLarge):
        checkpoints.save("conversation", workspace, SavedFiles())
    assert checkpoints.restore("conversation", tmp_path / "restored") == Checkpoint(1, 5)


def test_a_place_without_room_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    workspace, place = tmp_path / "workspace", tmp_path / "checkpoints"
    workspace.mkdir()
    (workspace / "file").write_text("small")
    checkpoints = Checkpoints(f"file://{place}", SystemClock())
    checkpoints.save("conversation", workspace, SavedFiles())
    (workspace / "file").unlink()
    (workspace / "big").write_bytes(os.urandom(100_000))
    with limited(resource.RLIMIT_FSIZE, 50_000), pytest.raises(CheckpointsUnavailable, match="File too large"):
        checkpoints.save("conversation", workspace, SavedFiles())
    assert [path for path in place.rglob(".*") if path.is_file()] == []
    assert checkpoints.restore("conversation", tmp_path / "restored") == Checkpoint(1, 5)


def test_without_descriptors_the_last_checkpoint_stays(url: str, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    deep = workspace.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "file").write_text("deep")
    checkpoints = Checkpoints(url, SystemClock())
    checkpoints.save("conversation", workspace, SavedFiles())
    next_one = os.dup(0)
    os.close(next_one)
    for spare in range(2, 24, 4):
        with limited(resource.RLIMIT_NOFILE, next_one + spare), suppress(OSError, CheckpointsUnavailable):
            checkpoints.save("conversation", workspace, SavedFiles())
        checkpoints.restore("conversation", tmp_path / f"restored-{spare}")
        assert content(tmp_path / f"restored-{spare}") == content(workspace)


def test_every_storage_exception_is_one_error(tmp_path: Path) -> None:
    fsspec.register_implementation("moody", Moody, clobber=True)
    (tmp_path / "file").write_text("x")
    checkpoints = Checkpoints(f"moody://{tmp_path.name}", SystemClock())
    checkpoints.save("conversation", tmp_path, SavedFiles())
    Moody.moods.add("down")
    try:
        with pytest.raises(CheckpointsUnavailable, match="no credentials"):
            checkpoints.save("conversation", tmp_path, SavedFiles())
        with pytest.raises(CheckpointsUnavailable, match="no credentials"):
            checkpoints.has("conversation")
    finally:
        Moody.moods.clear()


def test_a_damaged_piece_is_not_restored(workspace: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/checkpoints", SystemClock())
    checkpoints.save("conversation", workspace, SavedFiles())
    piece = max(
        (tmp_path / "checkpoints" / "objects").rglob("*"), key=lambda path: path.stat().st_size * path.is_file()
    )
    for damage in (b"nonsense", zstandard.compress(b"other content")):
        piece.write_bytes(damage)
        with pytest.raises(CheckpointCorrupt):
            checkpoints.restore("conversation", tmp_path / "restored")
        assert not (tmp_path / "restored").exists()
    assert [path.name for path in tmp_path.iterdir() if "restored" in path.name] == []


@pytest.mark.parametrize(
    "rows",
    [
        [["../out", "file", 420, 0, 0, []]],
        [["/etc/out", "file", 420, 0, 0, []]],
        [["a", "link", 511, 0, 0, "/etc"], ["a/out", "file", 420, 0, 0, []]],
        [["a", "directory", 511, 0, 0, ""], ["a/../../out", "file", 420, 0, 0, []]],
        [["missing/out", "file", 420, 0, 0, []]],
        [["a", "device", 420, 0, 0, ""]],
        [["a", "file"]],
    ],
)
def test_a_manifest_that_leads_out_is_refused(tmp_path: Path, rows: list[object]) -> None:
    (tmp_path / "checkpoints" / "checkpoints").mkdir(parents=True)
    manifest = zstandard.compress(json.dumps({"version": 1, "entries": rows}).encode())
    (tmp_path / "checkpoints" / "checkpoints" / "conversation").write_bytes(manifest)
    with pytest.raises(CheckpointCorrupt):
        Checkpoints(f"file://{tmp_path}/checkpoints", SystemClock()).restore("conversation", tmp_path / "restored")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_checkpoint_never_restores_a_set_user_id_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/checkpoints", SystemClock())
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "program").write_text("")
    (tmp_path / "workspace" / "program").chmod(0o6755)
    checkpoints.save("conversation", tmp_path / "workspace", SavedFiles())
    checkpoints.restore("conversation", tmp_path / "restored")
    assert (tmp_path / "restored" / "program").stat().st_mode & 0o7777 == 0o755
    rows = [["folder", "directory", 0o7755, 0, 0, ""], ["folder/program", "file", 0o6755, 0, 0, []]]
    manifest = zstandard.compress(json.dumps({"version": 1, "entries": rows}).encode())
    (tmp_path / "checkpoints" / "checkpoints" / "conversation").write_bytes(manifest)
    checkpoints.restore("conversation", tmp_path / "forged")
    for name in ("folder", "folder/program"):
        assert (tmp_path / "forged" / name).stat().st_mode & 0o7777 == 0o755


OWN = "The files of this workspace were restored from the last checkpoint, which was saved after event "


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


async def test_another_node_goes_on_from_the_last_checkpoint(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place") as one:
        assert printed(await one.run("echo first > file")) == ""
        await one.run("echo second >> file")
        await one.run("echo third >> file")
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        told = await two.run("cat file; touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.content.startswith(OWN), told.error_id) == (True, "workspace_lost")
        assert printed(await two.run("cat file; ls")) == "first\nsecond\nfile"


async def test_returning_lost_node_does_not_continue_with_older_files(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file; touch ~/old /tmp/old")
        async with node(log, tmp_path / "two", tmp_path / "place", every=1) as two:
            assert ((await two.run("true", moves=1)).content).startswith(OWN)
            await two.run("echo second >> file", moves=1)
        told = await one.run("cat file", moves=2)
        assert (told.content or "").startswith(OWN)
        assert printed(await one.run("cat file; find ~ /tmp -maxdepth 1 -name old", moves=2)) == "first\nsecond"


async def test_while_the_place_cannot_be_reached_nothing_is_given_up(log: EventLog, tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=1) as one:
        await one.run("echo first > file")
    manifests = place / "checkpoints"
    away = manifests.rename(tmp_path / "away")
    manifests.symlink_to(manifests)  # following it fails with ELOOP
    async with node(log, tmp_path / "two", place, every=1) as two:
        told = await two.run("touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.error_id, "The action was not run" in told.content) == ("checkpoints_unavailable", True)
        manifests.unlink()
        away.rename(manifests)
        assert ((await two.run("true")).content or "").startswith(OWN)
        assert printed(await two.run("cat file; ls")) == "first\nfile"


async def test_fork_gets_the_files_of_its_event_with_notice(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=2) as one:
        for number in range(1, 5):
            await one.run(f"echo {number} > file")
        events = await log.read(CID)
        assert len(events) == 9
        for at, saved, file in ((7, 5, "2"), (8, 5, "2")):
            await log.create_from(build_fork(events[:at], f"fork-{at}"), events[1:at], key=f"fork-{at}")
            told = await one.run("ls", conversation_id=f"fork-{at}")
            assert f"as they were after event {saved}; the fork is at event {at}. Later changes" in told.content
            assert printed(await one.run("cat file", conversation_id=f"fork-{at}")) == file
        await log.create_from(build_fork(events[:2], "fork-2"), events[1:2], key="fork-2")
        told = await one.run("ls", conversation_id="fork-2")
        assert "after event 5. That is later than the fork at event 2: they contain changes" in told.content
        assert printed(await one.run("cat file", conversation_id="fork-2")) == "2"


async def test_only_some_checkpoints_are_kept(log: EventLog, tmp_path: Path) -> None:
    checkpoints = Checkpoints(f"file://{tmp_path}/place", SystemClock())
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    for event in range(1, 31):
        (workspace / "file").write_text(str(event))
        checkpoints.save(CID, workspace, SavedFiles(), event=event)
    for at, event in ((30, 30), (25, 25), (5, 1), (1, 1)):
        assert checkpoints.copy(CID, f"fork-{at}", at=at)
        assert checkpoints.restore(f"fork-{at}", tmp_path / f"fork-{at}").event == event
        assert (tmp_path / f"fork-{at}" / "file").read_text() == str(event)
    assert len(list((tmp_path / "place" / "history" / CID).iterdir())) == 10
    assert CheckpointRemoval(f"file://{tmp_path}/place", SystemClock()).drop_unused() == 20
    checkpoints.forget(CID)
    assert not checkpoints.has(CID)
    assert list((tmp_path / "place" / "history" / CID).iterdir()) == []


def test_forks_of_one_checkpoint_share_its_manifest_until_they_save(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    checkpoints.save(CID, tmp_path / "shared", SavedFiles(), event=3)
    for number in range(3):
        assert checkpoints.copy(CID, f"fork-{number}", at=3)
        checkpoints.save("fork-0", tmp_path / "own", SavedFiles(), event=5)  # also after the others were made from it
    for number, content in ((0, "own"), (1, "shared"), (2, "shared")):
        restored = checkpoints.restore(f"fork-{number}", tmp_path / f"fork-{number}")
        assert (restored.source, (tmp_path / f"fork-{number}" / "file").read_text()) == (CID if number else "", content)
        assert checkpoints.describe(f"fork-{number}") == checkpoints.describe(f"fork-{number}")
    checkpoints.save(CID, tmp_path / "own", SavedFiles(), event=3)
    checkpoints.copy(CID, "fork-3", at=3)
    assert checkpoints.describe("fork-3").tree == checkpoints.describe("fork-0").tree


async def test_unsaved_files_are_reported_as_lost(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", None) as one:
        await one.run("echo first > file")
    async with node(log, tmp_path / "two", None) as two:
        told = await two.run("touch effect")
        assert isinstance(told, ErrorObservation)
        assert (told.content, told.error_id) == (LOST, "workspace_lost")
        assert printed(await two.run("ls")) == ""
    async with node(log, tmp_path / "one", None) as one:
        assert printed(await one.run("cat file")) == "first"


async def test_closing_saves_what_another_worker_of_the_node_has_changed(log: EventLog, tmp_path: Path) -> None:
    place, close = tmp_path / "place", ControlDelivery(CID, 0, "close", "")
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo first > file")
        await one.executor.execute_control(close)
        async with node(log, tmp_path / "one", place, every=100) as other:
            await other.run("echo second >> file")
            await one.executor.execute_control(close)
            await other.run("echo third >> file")
        async with node(log, tmp_path / "one", place, every=100) as next_one:
            await next_one.executor.execute_control(close)
    async with node(log, tmp_path / "two", place) as two:
        await two.run("true")
        assert printed(await two.run("cat file | xargs")) == "first second third"


async def test_workers_of_one_node_save_a_workspace_in_turn(log: EventLog, tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo first > file")
        with (tmp_path / "one" / CID / "saving.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # as another worker does that saves it
            saving = asyncio.create_task(one.checkpointing.save(CID))
            await one.run("echo second >> file")
            assert not saving.done()
        await saving
    Checkpoints(f"file://{place}", SystemClock()).restore(CID, tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_text() == "first\nsecond\n"


async def test_closing_a_returned_lost_node_saves_no_older_files(
    log: EventLog, memory_store: Store, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    async with node(log, tmp_path / "one", place, every=100) as one:
        await one.run("echo older > file")
        await one.checkpointing.save(CID)
        await one.run("echo lost >> file")
        await memory_store.connection.call("HINCRBY", memory_store.known_keys(CID).meta, "moves", 1)
        async with node(log, tmp_path / "two", place, every=1) as two:
            await two.run("true", moves=1)
            await two.run("echo newer > file", moves=1)
            await one.executor.execute_control(ControlDelivery(CID, 0, "close", ""))
    Checkpoints(f"file://{place}", SystemClock()).restore(CID, tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_text() == "newer\n"


async def test_whoever_takes_over_after_a_crash_says_the_same(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file")
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        await log.append(CID, [CmdRunAction(command="touch effect")])
        action = (await log.read(CID))[-1]
        assert (await two.checkpointing.recover(CID, action.id) or "").startswith(OWN)  # and then it dies
        delivery = ActionDelivery(CID, action.id, await log.load_entry(CID, action.id), WorkspaceSpec(), "")
        await two.executor.execute(delivery, ActionReclaimed(2, "tool-1"))
        assert ((await log.read(CID))[-1].content or "").startswith(OWN)
        assert printed(await two.run("ls")) == "file"


async def test_a_fork_begins_with_the_files_of_its_source(log: EventLog, tmp_path: Path) -> None:
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo first > file")
        last = await log.load_last_id(CID)
        await log.fork(CID, ConversationCreated(conversation_id="fork", forked_from=CID), at=last)
        told = await one.run("ls", conversation_id="fork")
        assert "of the conversation that this one was forked from. It does not say when it was saved" in told.content
        assert printed(await one.run("cat file; echo more >> file", conversation_id="fork")) == "first"
        assert printed(await one.run("cat file")) == "first"


async def test_a_directory_of_the_user_is_not_copied(log: EventLog, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        await one.run("echo mine > file", spec=WorkspaceSpec(path=str(project)))
        await one.executor.execute_control(ControlDelivery(CID, 0, "close", ""))
    assert (project / "file").read_text() == "mine\n"
    assert not (tmp_path / "place").exists()


async def test_a_place_that_does_not_work_fails_no_action(
    log: EventLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").write_text("not a directory")
    async with node(log, tmp_path / "one", tmp_path / "place", every=1) as one:
        assert printed(await one.run("echo fine")) == "fine"
        assert printed(await one.run("echo still")) == "still"
    assert f"cannot save the workspace of {CID}" in caplog.text


async def test_a_workspace_is_saved_when_somebody_asks_for_it(valkey_store: Store, tmp_path: Path) -> None:
    log = EventLog(valkey_store)
    await log.create(ConversationCreated(conversation_id=CID))

    async def asked(one: Node) -> tuple[int, int]:
        return await serve(one, valkey_store, WorkspaceFiles(valkey_store).checkpoint(CID))

    async with node(log, tmp_path / "one", tmp_path / "place", every=100) as one:
        await one.run("echo first > file; mkdir folder")
        assert not one.checkpointing._checkpoints.has(CID)  # type: ignore[union-attr]
        assert await asked(one) == (2, 6)
    async with node(log, tmp_path / "two", tmp_path / "place") as two:
        await two.run("true")
        assert printed(await two.run("cat file")) == "first"
    async with node(log, tmp_path / "three", None) as three:
        await three.run("true")
        with pytest.raises(TransferFailed, match="saves no checkpoints") as raised:
            await asked(three)
        assert "DECKHANDS_CHECKPOINTS" in (raised.value.remedy or "")


async def test_only_what_nobody_needs_goes(valkey_server: RealServer, tmp_path: Path) -> None:
    place, archive = f"file://{tmp_path}/checkpoints", tmp_path / "archive"
    checkpoints = Checkpoints(place, SystemClock())
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("content")
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        services = JobServices(client.store, BrokerSettings(archive=str(archive), checkpoints=place))
        assert await remove_checkpoints(services) == {"forgotten": 0, "dropped": 0}
        for name in ("archived", "origin", "gone", "here"):
            await begin_ended(client, name)
            checkpoints.save(name, tmp_path / "work", SavedFiles(), event=3)
            if name == "archived":
                await retired(client.store, archive, tmp_path)
        await client.fork("origin")
        await client.delete("origin")
        await client.delete("gone")
        assert await remove_checkpoints(services) == {"forgotten": 1, "dropped": 0}
        left = [name for name in ("archived", "origin", "gone", "here") if checkpoints.has(name)]
        assert left == ["archived", "origin", "here"]
        (tmp_path / "checkpoints" / "checkpoints" / "here").write_text("damaged")
        with pytest.raises(CheckpointsNotRemoved, match="cannot be removed"):
            await remove_checkpoints(services)
        assert checkpoints.has("origin")
