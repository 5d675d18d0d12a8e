"""`deckhands skills`: the list and the check of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deckhands.cli.main import call
from tests.trees import write_files

FILES = {
    "AGENTS.md": "Use tabs.",
    "docs/CLAUDE.md": "Write British English.",
    ".agents/skills/pdf/SKILL.md": "---\nname: pdf\ndescription: Reads PDFs.\n---\nRun it.",
    ".agents/skills/pdf/references/forms.md": "about forms",
    ".openhands/skills/git.md": "---\ntriggers: [git, push]\n---\nRebase.",
}
BAD = {
    ".claude/skills/Big_One/SKILL.md": "---\nname: Big_One\n---\nText.",
    ".claude/skills/other/SKILL.md": f"---\nname: another\ndescription: {'x' * 1025}\n---\n",
    ".openhands/skills/bad.md": "---\na: !!x y\n---\nBad.",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    write_files(home, {".agents/skills/mine/SKILL.md": "---\nname: mine\ndescription: Mine.\n---\nMy way."})
    return write_files(tmp_path / "work", FILES)


def test_list_says_when_each_skill_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["skills", "ls", str(folder), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(skill["name"], skill["shown"], skill["file"]) for skill in found] == [
        ("agents", "always", "AGENTS.md"),
        ("git", "with git, push", ".openhands/skills/git.md"),
        ("pdf", "when needed", ".agents/skills/pdf/SKILL.md"),
        ("claude:docs", "with a file docs/**", "docs/CLAUDE.md"),
        ("mine", "with mine", "~"),
    ]
    assert call(["skills", "ls", str(folder)]) == 0
    assert "when needed" in capsys.readouterr().out


def test_check_names_every_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["skills", "check", str(folder)]) == 0
    assert capsys.readouterr() == ("", "5 files checked, 0 problems found.\n")
    write_files(folder, BAD)
    assert call(["skills", "check", str(folder)]) == 1
    said = capsys.readouterr()
    assert [line.partition(": ")[::2] for line in said.out.splitlines()] == [
        (".openhands/skills/bad.md", "the front matter has a tag (!); leave it out, or quote the value"),
        (
            ".claude/skills/Big_One/SKILL.md",
            "`name` may have 64 lower-case letters, digits and single hyphens between them",
        ),
        (
            ".claude/skills/Big_One/SKILL.md",
            "`description` is missing: it tells the agent what the skill is for, and when to read it",
        ),
        (".claude/skills/other/SKILL.md", "it has no text"),
        (".claude/skills/other/SKILL.md", "`name` is 'another', and its folder 'other'; both must be the same"),
        (".claude/skills/other/SKILL.md", "`description` has 1025 characters; 1024 are allowed"),
    ]
    assert said.err == "8 files checked, 6 problems found.\n"


def test_servers_that_skills_ask_for_are_listed_and_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = json.dumps({"mcpServers": {"forms": {"url": "https://mcp.example.com/mcp"}, "local": {"command": "x"}}})
    legacy = "---\nmcp_tools:\n  mcpServers:\n    old:\n      url: https://old.example.com/mcp\n---\nUse it."
    write_files(folder, {".agents/skills/pdf/.mcp.json": servers, ".openhands/skills/legacy.md": legacy})
    write_files(folder, {".agents/skills/no-skill/.mcp.json": servers})
    assert call(["skills", "ls", str(folder), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted((one["server"], one["skill"], one["url"]) for one in found if "server" in one) == [
        ("forms", "pdf", "https://mcp.example.com/mcp"),
        ("local", "pdf", ""),
        ("old", "legacy", "https://old.example.com/mcp"),
    ]
    write_files(folder, {".agents/skills/pdf/.mcp.json": '{"mcpServers": {"a b": {"url": "x"}}}'})
    assert call(["skills", "check", str(folder)]) == 1
    assert ".agents/skills/pdf/.mcp.json: the name of an MCP server" in capsys.readouterr().out
