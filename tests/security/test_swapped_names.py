"""Names that are swapped between the look at them and their use: nothing is read or used but what was looked at."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from broker.coordination.transfers import TransferRequest
from broker.runtime.errors import DeckhandsError
from tests.integration.workspace_hosts import Terminal, opened
from tests.security.directory_world import World, world
from tool_worker.errors import FileUnfit, WorkspaceRefused, WorkspaceUnavailable
from tool_worker.settings import load_tool_settings
from tool_worker.worker import packing
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.node_capacity import NodeCapacity

# Two swaps at once: the file itself, and the directory that it is in, each between something inside and a way out.
RENAMER = """
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
def running(program: str, *arguments: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            running.kill()


@contextmanager
def flipped(folder: Path) -> Iterator[Path]:
    """Yield a directory in which names are swapped for links that lead to `secret`."""
    inside, outside = folder / "inside", folder / "outside"
    (inside / "directory").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (inside / "file").write_text("harmless")
    (inside / "directory" / "secret").write_text("harmless")
    with running(RENAMER, inside, outside / "secret"):
        yield inside


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


# Swaps a directory for a link, or for another directory, and back, as fast as the kernel does.
FLIPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
here, there = (os.fsencode(name) for name in sys.argv[1:])
print("ready", flush=True)
while True:
    libc.renameat2(-100, here, -100, there, 2)
"""
OPENINGS = 40


class Swapping(NodeCapacity):
    """Does something between the look at a directory and its use: room is made right before a host is started."""

    def __init__(self, swap: list[tuple[Path, Path]]) -> None:
        super().__init__()
        self._swap = swap

    def find_shortage(self) -> None:
        for old, new in self._swap:
            old.rename(new)
        self._swap.clear()


@pytest.fixture
def made() -> Iterator[World]:
    with world() as made:
        (made.roots / "swapped").mkdir()
        (made.roots / "swapped" / "file").write_text("harmless")
        yield made


def flipping(here: Path, there: Path) -> AbstractContextManager[None]:
    return running(FLIPPER, here, there)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize("other", ["link", "to-root", "to-neighbour", "good"])
async def test_replaced_directory_is_not_entered_before_binding(made: World, sandbox: str, other: str) -> None:
    swapped = made.roots / "swapped"
    room = Swapping([(swapped, made.roots / "kept"), (made.roots / other, swapped)])
    named = load_tool_settings(made.environment).named
    async with opened(made.node, sandbox=sandbox, named=named, capacity=room) as workspaces:
        # Another directory below a root may be used, but is not the one that was looked at.
        error = WorkspaceUnavailable if other == "good" else WorkspaceRefused
        with pytest.raises(error):
            await workspaces.open("victim", WorkspaceSpec(path=str(swapped)))
    if other == "good":
        log = HostFolder(made.node, "victim").read_log_tail()
        assert log == "the workspace was replaced by another directory"


@pytest.mark.parametrize(
    "other", ["to-root", *(pytest.param(one, marks=pytest.mark.soak) for one in ("link", "to-neighbour", "good"))]
)
async def test_no_opening_gets_out_while_names_are_swapped(made: World, other: str) -> None:
    swapped, came = made.roots / "swapped", []
    named = load_tool_settings(made.environment).named
    async with opened(made.node, sandbox="bwrap", named=named) as workspaces:
        with flipping(swapped, made.roots / other):
            for number in range(OPENINGS):
                conversation_id = f"racer-{number}"
                try:
                    run = Terminal(await workspaces.open(conversation_id, WorkspaceSpec(path=str(swapped))))
                except DeckhandsError as error:
                    came.append(error.code)
                else:
                    came.append((await run("cat file secret.key etc/shadow 2>/dev/null")).content.strip())
                await workspaces.close(conversation_id)
    allowed = {"harmless", "", "workspace_refused", "workspace_unavailable"}
    assert set(came) <= allowed, came


def test_files_are_carried_from_the_directory_that_was_looked_at(made: World) -> None:
    swapped = made.roots / "swapped"
    root = made.node
    bindings = Bindings(root, load_tool_settings(made.environment).named)
    folder = HostFolder(root, "carried")
    folder.create()
    from tests.security.test_directory_neighbours import bound_to

    with bindings.bind(folder, bound_to(swapped, "acme")) as directory:
        swapped.rename(made.roots / "kept")
        swapped.symlink_to(made.home)
        content = io.BytesIO()
        packing.pack(directory, "file", content)
        with pytest.raises(FileNotFoundError):
            packing.pack(directory, "secret.key", io.BytesIO())
        content.seek(0)
        upload = TransferRequest(what="upload", path="copy")
        packing.unpack(directory, upload, content, made.top / "noted")
    assert (made.roots / "kept" / "copy").read_text() == "harmless"
    assert not (made.home / "copy").exists()
    with pytest.raises(WorkspaceRefused, match="a part of its path is a symbolic link"):
        bindings.open(folder, folder.read_binding())


def test_own_workspace_turned_into_a_link_is_not_followed(made: World) -> None:
    own = made.neighbour / "workspace"
    own.rename(made.neighbour / "kept")
    own.symlink_to(made.home)
    with pytest.raises(DeckhandsError, match="does not exist"):
        Bindings(made.node, NamedDirectories()).open(HostFolder(made.node, "neighbour"))
