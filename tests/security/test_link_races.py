"""Reading files of a workspace while a program in it swaps names: nothing from outside is ever read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tool_worker.errors import FileUnfit
from tool_worker.workspace.files.openat2_paths import Directory

# Two swaps at once: the file itself, and the directory that it is in, each between something inside and a way out.
FLIPPER = """
import os, sys
inside, secret = sys.argv[1:]
os.chdir(inside)
for name, target in {"out-file": secret, "out-directory": os.path.dirname(secret)}.items():
    os.symlink(target, name)
print("ready", flush=True)
while True:
    for name, way_out in (("file", "out-file"), ("directory", "out-directory")):
        os.rename(name, "kept-" + name)
        os.rename(way_out, name)
        os.rename(name, way_out)
        os.rename("kept-" + name, name)
"""


@contextmanager
def flipped(folder: Path) -> Iterator[Path]:
    """Yield a directory in which names are swapped for links that lead to `secret`."""
    inside, outside = folder / "inside", folder / "outside"
    (inside / "directory").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (inside / "file").write_text("harmless")
    (inside / "directory" / "secret").write_text("harmless")
    command = [sys.executable, "-I", "-S", "-c", FLIPPER, str(inside), str(outside / "secret")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flipper:
        assert flipper.stdout.readline() == b"ready\n"
        yield inside
        flipper.kill()


def read_by_look_and_open(inside: Path, name: str) -> str | None:
    """Read as many programs do: see where the path leads, then open it."""
    path = inside / name
    try:
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            return None
        return path.read_text()
    except OSError:
        return None


@pytest.mark.parametrize("reads", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_no_read_gets_out(tmp_path: Path, reads: int) -> None:
    found: dict[str, int] = {}
    with flipped(tmp_path) as inside, Directory(inside) as directory:
        for number in range(reads):
            name = ("file", "directory/secret")[number % 2]
            try:
                text = directory.read(name, 100, follows_links=number % 4 < 2).decode()
            except OSError as error:
                text = error.strerror or ""
            found[text] = found.get(text, 0) + 1
    assert "secret" not in found
    assert found["harmless"] > 0
    assert {"the path leads out of the workspace", "No such file or directory"} <= set(found)
    assert set(found) <= {
        *("harmless", "the path leads out of the workspace", "No such file or directory"),
        *("Too many levels of symbolic links", "Resource temporarily unavailable"),
    }


def test_the_race_is_one(tmp_path: Path) -> None:
    with flipped(tmp_path) as inside:
        assert any(
            read_by_look_and_open(inside, name) == "secret"
            for _ in range(100_000)
            for name in ("file", "directory/secret")
        )


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "inside" / "sub").mkdir(parents=True)
    (tmp_path / "inside" / "file").write_text("content")
    with Directory(tmp_path / "inside") as directory:
        yield directory


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../secret", "the path leads out of the workspace"),
        ("sub/../../secret", "the path leads out of the workspace"),
        ("/etc/passwd", "the path leads out of the workspace"),
        ("missing", "No such file or directory"),
    ],
)
def test_paths_that_lead_out(directory: Directory, path: str, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        directory.read(path, 100)


def test_links_stay_below_the_directory(directory: Directory) -> None:
    for name, target in {"good": "sub/../file", "out": "../secret", "absolute": "/etc/passwd"}.items():
        (directory.path / name).symlink_to(target)
    assert directory.read("good", 100) == b"content"
    for name in ("out", "absolute"):
        with pytest.raises(OSError, match="the path leads out of the workspace"):
            directory.read(name, 100)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        directory.read("good", 100, follows_links=False)


def test_only_regular_files_of_a_bounded_size(directory: Directory) -> None:
    os.mkfifo(directory.path / "fifo")
    for name in ("fifo", "sub", "."):
        with pytest.raises(FileUnfit, match="is not a regular file"):
            directory.read(name, 100)
    assert directory.read("file", 7) == b"content"
    with pytest.raises(FileUnfit, match="has more than 6 bytes"):
        directory.read("file", 6)


def test_the_directory_may_be_moved_meanwhile(directory: Directory) -> None:
    directory.path.rename(directory.path.with_name("moved"))
    directory.path.symlink_to("/")
    assert directory.read("file", 100) == b"content"
