"""An agent in the workspace of a fork, or in the one that is forked, tries to reach other files by the overlay."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.checkpoint_nodes import CID, fork, node_with_overlays, prepared, printed
from tool_worker.errors import WorkspaceUnavailable
from tool_worker.workspace.files.overlay_mounts import is_mounted
from tool_worker.workspace.layers import LayerLost, attach

CANARY = "canary-7f3a"
TRY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, call):
    try:
        print(name, call())
    except OSError as error:
        print(name, "refused", error.errno)
attempt("whiteout", lambda: os.mknod("hidden", 0o20666, os.makedev(0, 0)))
attempt("device", lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)))
for prefix in ("trusted", "user"):
    for name, value in (("opaque", b"y"), ("redirect", b"/"), ("metacopy", b""), ("origin", b"x"), ("whiteout", b"y")):
        attempt(f"{prefix}.{name}", lambda: os.setxattr("folder", f"{prefix}.overlay.{name}", value))
attempt("mount", lambda: libc.mount(b"x", b"/mnt", b"overlay", 0, b"lowerdir=/,upperdir=/tmp,workdir=/tmp") or os.getpid())
attempt("unshare", lambda: libc.unshare(0x10020000))
attempt("above", lambda: os.listdir("/workspace/../overlay"))
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with node_with_overlays(tmp_path) as root:
        yield root


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


async def test_nothing_planted_in_a_fork_changes_any_merged_tree(log: EventLog, root: Path) -> None:
    (root.parent / "canary").write_text(CANARY)
    async with prepared(log, root, "mkdir folder && echo one > folder/file && echo two > hidden") as one:
        for name in ("fork", "sibling"):
            await fork(log, name)
            await one.run("true", conversation_id=name)
        tried = printed(
            await one.run(f"cat > /tmp/try.py <<'END'\n{TRY}\nEND\npython3 /tmp/try.py", conversation_id="fork")
        )
        lines = dict(line.split(" ", 1) for line in tried.splitlines())
        for refused in ("whiteout", "device", "trusted.opaque", "trusted.redirect", "trusted.metacopy", "above"):
            assert lines[refused].startswith("refused"), tried
        assert lines["mount"] == lines["unshare"] == "-1", tried
        upper = root / "fork" / "overlay" / "upper"
        assert not any(stat.S_ISCHR(path.lstat().st_mode) for path in upper.rglob("*"))
        asked = (
            f"ln -s {root}/{CID}/workspace/folder out; ln -s ../../overlay/upper up; cat out/file up/* "
            f"{root.parent}/canary /proc/self/root{root.parent}/canary /workspace/../canary; "
            "mv folder away && mkdir folder && ls -A folder && cat away/file; "
            "grep -c deckhands /proc/self/mountinfo; ls /proc/1/root/ | head -30"
        )
        seen = printed(await one.run(asked, conversation_id="fork"))
        assert CANARY not in seen
        assert "one" in seen.splitlines()
        # A directory that was made in place of a renamed one is empty, and stays so when it is mounted again.
        for name in ("sibling", CID):
            assert (
                printed(await one.run("cat folder/file hidden; ls -1", conversation_id=name))
                == "one\ntwo\nfolder\nhidden"
            )
    tree = next((root / ".node" / "layers").glob("*/tree"))
    assert sorted(path.name for path in tree.rglob("*")) == ["file", "folder", "hidden"]
    assert (tree / "folder" / "file").read_text() == "one\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant them")
async def test_nothing_planted_in_the_original_gets_into_a_layer(log: EventLog, root: Path) -> None:
    (root.parent / "outside").mkdir()
    (root.parent / "outside" / "canary").write_text(CANARY)
    async with prepared(log, root, "mkdir folder && echo one > folder/file") as one:
        folder = root / CID / "workspace" / "folder"
        for name, value in (("opaque", b"y"), ("redirect", f"{root.parent}/outside".encode()), ("metacopy", b"")):
            os.setxattr(folder, f"trusted.overlay.{name}", value)
            os.setxattr(folder, f"user.overlay.{name}", value)
        os.mknod(folder / "whiteout", 0o20600, os.makedev(0, 0))
        os.mknod(folder / "disk", 0o60600, os.makedev(254, 0))
        os.mkfifo(folder / "fifo")
        (folder / "program").write_text("#!/bin/sh")
        (folder / "program").chmod(0o6755)
        (folder / "link").symlink_to(root.parent / "outside")
        await one.run("true")
        await fork(log, "fork")
        seen = printed(
            await one.run("ls folder; cat folder/file folder/canary folder/link/canary", conversation_id="fork")
        )
        assert seen.splitlines()[:2] == ["file  link  program", "one"]
        assert CANARY not in seen
    for path in next((root / ".node" / "layers").glob("*/tree")).rglob("*"):
        assert os.listxattr(path, follow_symlinks=False) == []
        mode = path.lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        assert not mode & 0o7000 or stat.S_ISLNK(mode)


@pytest.mark.parametrize("layer", ["../../../outside", "..", "/", "", 7, None])
def test_note_with_another_path_mounts_nothing(root: Path, layer: object) -> None:
    (root.parent / "outside" / "tree").mkdir(parents=True)
    (root / "fork" / "overlay" / "upper").mkdir(parents=True)
    (root / "fork" / "overlay" / "layer.json").write_text(json.dumps({"layer": layer}))
    with pytest.raises(LayerLost, match="names no layer"):
        attach(root / "fork")
    assert not is_mounted(root / "fork" / "workspace")


@pytest.mark.parametrize("part", ["overlay/upper", "workspace"])
def test_link_in_place_of_a_directory_is_not_followed(root: Path, part: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (root / ".node" / "layers" / "aa" / "tree").mkdir(parents=True)
    for name in ("overlay/upper", "overlay/work", "workspace"):
        (root / "fork" / name).mkdir(parents=True)
    (root / "fork" / part).rmdir()
    (root / "fork" / part).symlink_to(outside)
    (root / "fork" / "overlay" / "layer.json").write_text(json.dumps({"layer": "aa"}))
    with pytest.raises(WorkspaceUnavailable, match="cannot be mounted"):
        attach(root / "fork")
    assert outside.stat().st_dev == root.stat().st_dev
    assert list(outside.iterdir()) == []
