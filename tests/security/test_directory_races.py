"""A directory is swapped for another between the look at it and its use: what was not looked at is not used."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from broker.coordination.transfers import TransferRequest
from broker.runtime.errors import DeckhandsError
from tests.integration.workspace_hosts import Terminal, opened
from tests.security.directory_world import World, world
from tool_worker.errors import WorkspaceRefused, WorkspaceUnavailable
from tool_worker.settings import load_tool_settings
from tool_worker.worker import packing
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.node_capacity import NodeCapacity

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


@contextmanager
def flipping(here: Path, there: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", "-c", FLIPPER, str(here), str(there)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flipper:
        assert flipper.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            flipper.kill()


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
    with pytest.raises(DeckhandsError, match="is not there"):
        Bindings(made.node, NamedDirectories()).open(HostFolder(made.node, "neighbour"))
