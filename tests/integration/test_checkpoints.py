"""Checkpoints of workspaces: whole, incremental, and safe against what a workspace or a store may hold."""

from __future__ import annotations

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

from broker.runtime.clock import SystemClock
from tests.trees import cleared, nested, without_rights
from tool_worker.errors import CheckpointCorrupt, CheckpointsUnavailable, WorkspaceTooLarge
from tool_worker.workspace.checkpoints.checkpoint_store import (
    PIECE_BYTES,
    Checkpoint,
    Checkpoints,
    SavedFiles,
)
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
    """Return what a checkpoint should keep of a tree."""
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


def test_what_is_restored_is_what_was_saved(checkpoints: Checkpoints, workspace: Path, tmp_path: Path) -> None:
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


def test_a_fork_has_the_checkpoint_of_its_source(checkpoints: Checkpoints, workspace: Path, tmp_path: Path) -> None:
    assert not checkpoints.copy("source", "fork")
    checkpoints.save("source", workspace, SavedFiles())
    assert checkpoints.copy("source", "fork")
    (workspace / "run.sh").write_text("other")
    checkpoints.save("source", workspace, SavedFiles())
    checkpoints.restore("fork", tmp_path / "restored")
    assert (tmp_path / "restored" / "run.sh").read_text() == "#!/bin/sh\n"


def test_what_nobody_needs_any_more_is_dropped(checkpoints: Checkpoints, url: str, tmp_path: Path) -> None:
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


def test_whatever_the_client_of_a_place_raises_is_one_error(tmp_path: Path) -> None:
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
