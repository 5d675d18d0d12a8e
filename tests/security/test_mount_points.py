"""Mounts of a sandbox below a named directory, which agents may write to: no mount point leads out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from tests.integration.workspace_hosts import Terminal, opened
from tool_worker.workspace.launch.session_programs import SessionPrograms
from tool_worker.workspace.named_directories import NamedDirectories


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "projects" / "project"
    (project / "deep" / "inside" / "tools").mkdir(parents=True)
    (project / "deep" / "inside" / "tools" / "tool").write_text("the operator's\n")
    return project


def settings(project: Path, *read_only: Path) -> dict[str, object]:
    return {
        "sandbox": "bwrap",
        "named": NamedDirectories([project.parent]),
        "programs": SessionPrograms(read_only=read_only or (project / "deep" / "inside" / "tools",)),
    }


async def test_parents_of_a_mount_point_cannot_be_replaced(tmp_path: Path, project: Path) -> None:
    spec = WorkspaceSpec(path=str(project))
    async with opened(tmp_path / "node", **settings(project)) as workspaces:
        run = Terminal(await workspaces.open("one", spec))
        assert (await run("cat deep/inside/tools/tool")).content == "the operator's"
        for way in ("deep", "deep/inside", "deep/inside/tools"):
            assert (await run(f"mv {way} moved 2>/dev/null || rmdir {way} 2>/dev/null || echo kept")).content == "kept"
        assert (
            await run("echo x > deep/new; echo y > deep/inside/new; cat deep/new deep/inside/new")
        ).content == "x\ny"
        assert "Read-only" in (await run("echo z > deep/inside/tools/tool")).content
        # Beside it, the same directory is open in a second conversation, which cannot replace it either.
        other = Terminal(await workspaces.open("two", spec))
        assert (await other("mv deep moved 2>/dev/null || echo kept")).content == "kept"
    assert (project / "deep" / "inside" / "new").read_text() == "y\n"


@pytest.mark.parametrize("way", ["absolute", "relative", "old root"])
async def test_link_on_the_way_to_a_mount_leads_nowhere(tmp_path: Path, project: Path, way: str) -> None:
    outside = tmp_path / "outside"
    (outside / "inside" / "tools").mkdir(parents=True)
    before = sorted(outside.rglob("*"))
    up = "/".join([".."] * (len(project.parts) - 1))
    target = {"absolute": outside, "relative": f"{up}{outside}", "old root": f"{up}/../oldroot{outside}"}[way]
    (project / "deep").rename(project / "moved")
    (project / "deep").symlink_to(target)
    missing = project / "deep" / "inside" / "tools" / "not" / "there"
    readable = project / "deep" / "inside" / "tools"
    async with opened(tmp_path / "node", **settings(project, readable, missing)) as workspaces:
        run = Terminal(await workspaces.open("one", WorkspaceSpec(path=str(project))))
        assert (await run("echo works; touch deep/inside/tools/x 2>/dev/null")).content == "works"
    assert sorted(outside.rglob("*")) == before
