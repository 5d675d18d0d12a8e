"""What a run may change in its workspace, and what is found of what it must not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.interop.headless.inside import PathDenied
from deckhands.interop.headless.permitted_folders import PermittedFolders
from tests.trees import write_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    return write_files(place, {name: name for name in ("src/a.py", "src/deep/b.py", "out/old.txt", "notes.txt")})


def put_back_times(path: Path, change: Callable[[], object]) -> None:
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_and_put_back(root: Path) -> None:
    """Change a file, then give it its old content, size and mtime again."""
    path = root / "src/a.py"
    put_back_times(path, lambda: (path.write_text("x" * 8), path.write_text("src/a.py")))


def swap_permitted(root: Path) -> None:
    """Replace the permitted folder by a link to one that is not, and write through it."""
    (root / "out").rename(root / "src/out")
    (root / "out").symlink_to("src")
    (root / "out/c.py").write_text("c")


def write_through_link(root: Path) -> None:
    (root / "out/link").symlink_to("../src")
    (root / "out/link/a.py").write_text("changed")


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a new file": (lambda root: (root / "new.txt").write_text("x"), ["new.txt"]),
    "a new folder": (lambda root: (root / "src/new").mkdir(), ["src/new"]),
    "other content": (lambda root: (root / "src/a.py").write_text("x"), ["src/a.py"]),
    "content put back": (change_and_put_back, ["src/a.py"]),
    "a removed file": (lambda root: (root / "notes.txt").unlink(), ["notes.txt"]),
    "a renamed file": (lambda root: (root / "src/a.py").rename(root / "src/z.py"), ["src/a.py", "src/z.py"]),
    "moved into a permitted one": (lambda root: (root / "src/a.py").rename(root / "out/a.py"), ["src/a.py"]),
    "a renamed folder": (
        lambda root: (root / "src/deep").rename(root / "src/other"),
        ["src/deep", "src/deep/b.py", "src/other", "src/other/b.py"],
    ),
    "other rights": (lambda root: (root / "src/a.py").chmod(0o777), ["src/a.py"]),
    "other rights of a folder": (lambda root: (root / "src").chmod(0o700), ["src"]),
    "a link out": (lambda root: (root / "src/etc").symlink_to("/etc"), ["src/etc"]),
    "a link in a permitted one": (write_through_link, ["src/a.py"]),
    "a hard link in a permitted one": (lambda root: os.link(root / "src/a.py", root / "out/a.py"), ["src/a.py"]),
    "a permitted one swapped": (swap_permitted, ["out", "src/c.py", "src/out", "src/out/old.txt"]),
    "a name that is no text": (lambda root: (root / os.fsdecode(b"\xff")).write_text("x"), ["\\xff"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_change_outside_is_found(root: Path, case: str) -> None:
    change, paths = CHANGES[case]
    permitted = PermittedFolders.parse(root, ["out"])
    before = permitted.prepare()
    change(root)
    found = permitted.find_changes(before)
    assert (list(found.paths), found.count, found.fault) == (paths, len(paths), "")
    assert ascii(paths[0]) in str(found)


def test_what_is_permitted_is_not_reported(root: Path) -> None:
    permitted = PermittedFolders.parse(root, ["out", "new/deep"])
    before = permitted.prepare()
    (root / "out/old.txt").unlink()
    (root / "out/link").symlink_to("/etc")
    for name in ("new/deep/a", "README.md", "README.deckhands.md", "experiments/x/results/final.json", "logs/x/y"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "src/a.py").read_text()
    assert not permitted.find_changes(before)
    everything = PermittedFolders.parse(root, [])
    assert everything.prepare() == {}
    assert not everything.find_changes({})


def test_only_ten_paths_are_named(root: Path) -> None:
    permitted = PermittedFolders.parse(root, ["out"])
    before = permitted.prepare()
    for number in range(13):
        (root / f"f{number:02}").touch()
    found = permitted.find_changes(before)
    assert (found.paths, found.count) == (tuple(f"f{number:02}" for number in range(10)), 13)
    assert str(found).endswith("'f09' and 3 more.")


@pytest.mark.parametrize("text", ["/tmp", "..", "../x", "a/../../x", "a/..", ".", "", "a\0b", "/"])
def test_path_that_is_not_below_the_workspace_is_denied(root: Path, text: str) -> None:
    with pytest.raises(PathDenied):
        PermittedFolders.parse(root, ["out", text])
    with pytest.raises(PathDenied):
        PermittedFolders.parse(root, [str(root / "out")])


@pytest.mark.parametrize("text", ["link", "link/deep", "notes.txt", "notes.txt/a"])
def test_permitted_link_or_file_is_denied(root: Path, text: str) -> None:
    (root / "link").symlink_to("src")
    with pytest.raises(PathDenied):
        PermittedFolders.parse(root, [text]).prepare()


def test_too_many_files_are_refused(root: Path) -> None:
    permitted = PermittedFolders(root, frozenset({"out"}), max_files=6)
    before = permitted.prepare()
    assert len(before) == 5
    for name in ("x", "y"):
        (root / name).touch()
    found = permitted.find_changes(before)
    assert (bool(found), found.paths, "more than 6 files" in str(found)) == (True, (), True)
    with pytest.raises(UsageError, match="more than 6 files"):
        permitted.prepare()


def test_folders_too_deep_to_compare_count_as_changed(root: Path) -> None:
    permitted = PermittedFolders.parse(root, ["out"])
    before = permitted.prepare()
    descriptor = os.open(root, os.O_RDONLY)
    try:
        for _ in range(1_500):
            os.mkdir("d", dir_fd=descriptor)
            below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        assert permitted.find_changes(before)
    finally:  # Python's own removal of trees fails at such a depth
        os.close(descriptor)
        subprocess.run(["rm", "-rf", root / "d"], check=True)
