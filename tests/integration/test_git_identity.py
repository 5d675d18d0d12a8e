"""The identity with which an agent commits: a default exists, and more specific settings override it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from broker.runtime.errors import UsageError
from tests.integration.workspace_hosts import Terminal, opened
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.launch.host_plan import GitIdentity
from tool_worker.workspace.named_directories import NamedDirectories

COMMIT = (
    "git init -q . 2>/dev/null; echo x >> f; git add f && git commit -qm first && git log -1 --format='%an <%ae>, %cn'"
)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
async def test_the_first_commit_needs_no_settings(
    tmp_path: Path, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = GitIdentity('Build "bot" \\ #1; x', "bot@example.com")
    (tmp_path / "person").mkdir()
    environment = {"HOME": str(tmp_path / "person")} if sandbox == "none" else {}
    async with opened(tmp_path / "node", sandbox=sandbox, git_identity=identity, environment=environment) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        made = await run(COMMIT)
        assert (made.content, made.exit_code) == ('Build "bot" \\ #1; x <bot@example.com>, Build "bot" \\ #1; x', 0)
        await run("git config --global user.name Person")
        assert (await run(COMMIT)).content == "Person <bot@example.com>, Person"
        await run("git config user.name Project; git config user.email project@example.com")
        assert (await run(COMMIT)).content == "Project <project@example.com>, Project"
        assert (await run("git -c user.name=Once commit -q --amend -m x; git log -1 --format=%cn")).content == "Once"


async def test_git_identity_has_a_default_and_directories_keep_theirs(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    async with opened(tmp_path / "node", sandbox="bwrap", named=NamedDirectories([mine])) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        assert (await run(COMMIT)).content == "deckhands <deckhands@localhost>, deckhands"
        named = Terminal(await workspaces.open("named", WorkspaceSpec(path=str(mine))))
        await named("git init -q .; git config user.name Mine")
        assert (await named(COMMIT)).content == "Mine <deckhands@localhost>, Mine"


def test_the_identity_is_a_setting() -> None:
    assert load_tool_settings({}).git_identity == GitIdentity()
    settings = load_tool_settings({"DECKHANDS_GIT_USER_NAME": "Bot", "DECKHANDS_GIT_USER_EMAIL": "bot@example.com"})
    assert settings.git_identity == GitIdentity("Bot", "bot@example.com")


@pytest.mark.parametrize("text", ["a\n[core]\nfsmonitor=touch x", "a\0", "a\x1b[31m", "x" * 1000])
def test_identity_that_injects_git_settings_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="DECKHANDS_GIT_USER_"):
        load_tool_settings({"DECKHANDS_GIT_USER_NAME": text})
    with pytest.raises(UsageError, match="DECKHANDS_GIT_USER_"):
        load_tool_settings({"DECKHANDS_GIT_USER_EMAIL": text})
