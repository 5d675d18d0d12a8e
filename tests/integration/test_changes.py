"""The changes in a workspace as a patch: of root's containers, of large workspaces, and within bounds."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tool_worker.errors import WorkspaceTooLarge
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Enclosure
from tool_worker.workspace.opening.changes import Changes, Patch
from tool_worker.workspace.opening.confined_program import run_confined
from tool_worker.workspace.opening.repositories import SandboxedGit

MIB = 2**20
LIMIT_SECONDS = 60.0
OF_A_CONTAINER = 1000
MORE_THAN_IS_READ = 4 * 2**40
"""No machine reads that much within the limit."""


@pytest.fixture
def repositories(tmp_path: Path) -> SandboxedGit:
    return SandboxedGit(BubblewrapSandbox(tmp_path / ".sandbox"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "c1" / "workspace"
    workspace.mkdir(parents=True, mode=0o700)
    return workspace


async def recorded(repositories: SandboxedGit, workspace: Path) -> Path:
    """Record the workspace as it is, and return the base of later comparisons."""
    base = workspace.parent / "base"
    base.mkdir()
    await repositories.record(workspace, base)
    return base


async def compare(repositories: SandboxedGit, workspace: Path, base: Path | None = None) -> Patch:
    return await Changes(repositories).compare(workspace, base, limit_bytes=MIB)


def applied(target: Path, patch: bytes) -> None:
    target.mkdir(exist_ok=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=target, input=patch, check=True, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
async def test_changes_by_a_container_of_root_are_compared(repositories, workspace, tmp_path) -> None:
    for name in ("changed", "removed"):
        (workspace / name).write_text("before\n")
    base = await recorded(repositories, workspace)
    (workspace / "changed").write_text("after\n")
    (workspace / "removed").unlink()
    (workspace / "ignored").write_text("x")
    (workspace / ".gitignore").write_text("ignored\n")
    (workspace / "folder").mkdir(mode=0o700)
    (workspace / "folder" / "closed").write_text("mine\n")
    (workspace / "folder" / "closed").chmod(0o600)
    (workspace / "program").write_text("#!/bin/sh\n")
    (workspace / "program").chmod(0o755)
    (workspace / "link").symlink_to("/etc/shadow")
    (workspace / ".git").mkdir()
    for path in (workspace, *workspace.rglob("*")):
        os.chown(path, OF_A_CONTAINER, OF_A_CONTAINER, follow_symlinks=False)
    patch = await compare(repositories, workspace, base)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("changed", "removed"):
        (copy / name).write_text("before\n")
    applied(copy, patch.content)
    assert {path.name for path in copy.rglob("*")} == {
        *("changed", ".gitignore", "folder", "closed", "program", "link")
    }
    assert (copy / "changed").read_text() == "after\n"
    assert (copy / "link").readlink() == Path("/etc/shadow")
    assert os.access(copy / "program", os.X_OK)


async def test_files_that_do_not_fit_are_left_out_and_named(repositories, workspace, tmp_path) -> None:
    numbers = random.Random(1)
    for name, size in (("large", 2 * MIB), ("odd\nname", 2 * MIB), ("small", 100_000)):
        (workspace / name).write_bytes(numbers.randbytes(size))
    (workspace / "lines").write_text("\n" * 300_000)
    patch = await compare(repositories, workspace)
    assert patch.left_out == ("large", "odd\nname")
    assert len(patch.content) <= MIB
    applied(tmp_path / "copy", patch.content)
    for name in ("small", "lines"):
        assert (tmp_path / "copy" / name).read_bytes() == (workspace / name).read_bytes()


async def test_omitted_new_file_is_neither_read_nor_stored(repositories, workspace) -> None:
    with (workspace / "huge").open("wb") as huge:
        huge.truncate(MORE_THAN_IS_READ)
    (workspace / "small").write_text("small\n")
    patch = await Changes(repositories, limit_seconds=LIMIT_SECONDS).compare(workspace, None, limit_bytes=MIB)
    assert patch.left_out == ("huge",)
    assert b"+small" in patch.content


async def test_changed_file_types_are_in_the_patch(repositories, workspace, tmp_path) -> None:
    (workspace / "folder").mkdir()
    (workspace / "folder" / "inner").write_text("inner\n")
    for name in ("file", "link", "program", "same"):
        (workspace / name).write_text(f"{name}\n")
    before = tmp_path / "before"
    shutil.copytree(workspace, before)
    base = await recorded(repositories, workspace)
    shutil.rmtree(workspace / "folder")
    (workspace / "folder").write_text("a file\n")
    (workspace / "file").unlink()
    (workspace / "file").mkdir()
    (workspace / "file" / "a b\t\xe4").write_text("in a folder\n")
    (workspace / "link").unlink()
    (workspace / "link").symlink_to("same")
    (workspace / "program").chmod(0o755)
    (workspace / "same").write_text("same\n")
    (workspace / "void").touch()
    nested = workspace / "nested"
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    commit = ["-C", "nested", *identity, "commit", "-q", "--allow-empty", "-m", "m"]
    for arguments in (["init", "-q", "nested"], commit):
        subprocess.run(["git", *arguments], cwd=workspace, check=True, capture_output=True)
    (nested / "entered").write_text("no\n")
    patch = await compare(repositories, workspace, base)
    assert patch.left_out == ()
    assert b"Subproject commit" in patch.content
    assert b"entered" not in patch.content
    assert b"b/same" not in patch.content
    applied(before, patch.content)
    assert (before / "folder").read_text() == "a file\n"
    assert (before / "file" / "a b\t\xe4").read_text() == "in a folder\n"
    assert (before / "link").readlink() == Path("same")
    assert os.access(before / "program", os.X_OK)
    assert (before / "void").read_bytes() == b""


async def test_a_repository_without_a_commit_does_not_hide_other_changes(repositories, workspace) -> None:
    subprocess.run(["git", "init", "-q", "nested"], cwd=workspace, check=True, capture_output=True)
    (workspace / "new").write_text("new\n")
    patch = await compare(repositories, workspace)
    assert b"+new" in patch.content


async def test_large_changed_file_stays_unchanged_in_the_patch(repositories, workspace, tmp_path) -> None:
    (workspace / "large").write_bytes(random.Random(1).randbytes(MIB))
    (workspace / "folder").write_bytes(random.Random(2).randbytes(MIB))
    base = await recorded(repositories, workspace)
    (workspace / "large").write_bytes(random.Random(3).randbytes(MIB))
    (workspace / "folder").unlink()
    (workspace / "small").write_text("small\n")
    patch = await compare(repositories, workspace, base)
    assert patch.left_out == ("folder", "large")
    applied(tmp_path / "copy", patch.content)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["small"]


async def test_text_that_a_patch_makes_longer_fits_all_the_same(repositories, workspace) -> None:
    for number in range(10):
        (workspace / f"lines {number}").write_text("\n" * (MIB // 10))
    patch = await compare(repositories, workspace)
    assert MIB // 2 < len(patch.content) <= MIB
    assert len(patch.left_out) == 7


async def test_a_workspace_that_takes_too_long_is_described(repositories, workspace) -> None:
    (workspace / "file").write_text("1234")
    with pytest.raises(WorkspaceTooLarge) as failed:
        await Changes(repositories, limit_seconds=0.0).compare(workspace, None, limit_bytes=MIB)
    assert failed.value.message == (
        "The workspace has 1 entries with 4 bytes, too many to compare with its original state: not done "
        "within 0 seconds."
    )
    assert "deckhands cp" in failed.value.remedy


async def test_a_program_that_says_too_much_is_ended(tmp_path: Path) -> None:
    enclosure = Enclosure(tmp_path, str(tmp_path), ends_with_starter=True)
    sandbox = BubblewrapSandbox(tmp_path / ".sandbox")
    for _ in range(5):
        async with asyncio.timeout(LIMIT_SECONDS):
            with pytest.raises(WorkspaceTooLarge):
                await run_confined(
                    *(sandbox, enclosure, ["/bin/cat", "/dev/zero"]),
                    environment={},
                    limit_seconds=LIMIT_SECONDS,
                    output_limit_bytes=MIB,
                )
