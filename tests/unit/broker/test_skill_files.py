"""Skills: what files say to agents, and which words call them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.skills import MAX_SKILL_BYTES, skill_of, skills_in, skills_of, trigger_in
from broker.specs import Skill


def test_a_text_without_front_matter_always_counts() -> None:
    assert skill_of("repo", "Use tabs.\n") == Skill(name="repo", content="Use tabs.")


def test_triggers_make_it_count_when_they_are_mentioned() -> None:
    text = "---\nname: gitlab\ntype: knowledge\ntriggers:\n- gitlab\n- merge request\n---\nUse the API.\n"
    assert skill_of("git/lab", text) == Skill(
        name="gitlab", content="Use the API.", triggers=("gitlab", "merge request")
    )


def test_inputs_make_it_a_task_with_a_command_of_its_own() -> None:
    text = "---\nname: fix\ninputs:\n- name: BRANCH\n- name: ISSUE\ntriggers: [repair]\n---\nFix ${ISSUE}."
    skill = skill_of("fix", text)
    assert skill.triggers == ("repair", "/fix")
    assert skill.content == (
        "Fix ${ISSUE}.\n\n"
        "If the person did not provide any of these variables, ask for them before you begin: BRANCH, ISSUE."
    )


@pytest.mark.parametrize("head", ["a: [", "- a\n- b", "triggers: 3", "a: &a [*a, *a]\ntriggers: {b: *a}"])
def test_front_matter_that_cannot_be_read_is_an_error_and_spoils_no_other(head: str) -> None:
    bad = f"---\n{head}\n---\ntext"
    with pytest.raises(ValueError, match=r".+"):
        skill_of("bad", bad)
    files = [(".openhands/skills/bad.md", bad), (".openhands/skills/good.md", "Good.")]
    assert skills_of(files) == (Skill(name="good", content="Good."),)


def test_a_line_of_dashes_that_closes_nothing_is_text() -> None:
    assert skill_of("a", "---\nname: b\n").content == "---\nname: b"


def test_which_files_are_skills() -> None:
    files = [
        ("AGENTS.md", "1"),
        (".cursorrules", "2"),
        (".openhands_instructions", "3"),
        (".openhands/microagents/repo.md", "4"),
        (".openhands/microagents/knowledge/git.md", "5"),
        (".openhands/microagents/README.md", "6"),
        (".openhands/skills/notes.txt", "7"),
        (".openhands/skills/empty.md", " \n"),
        ("README.md", "8"),
    ]
    assert [(skill.name, skill.content) for skill in skills_of(files)] == [
        *(("agents", "1"), ("cursorrules", "2"), ("repo_legacy", "3"), ("repo", "4"), ("knowledge/git", "5")),
    ]


def test_of_namesakes_the_latest_counts() -> None:
    files = [(".openhands/microagents/a.md", "old"), (".openhands/skills/a.md", "new")]
    assert skills_of(files) == (Skill(name="a", content="new"),)


@pytest.mark.parametrize(
    ("text", "word"),
    [("Look at GitHub.", "github"), ("the digit", "git"), ("svn", ""), ("", "")],
)
def test_a_word_is_found_in_whatever_case_and_within_others(text: str, word: str) -> None:
    assert trigger_in(Skill(name="a", content="", triggers=("github", "Git")), text).lower() == word


def test_a_persons_own_skills(tmp_path: Path) -> None:
    assert skills_in(tmp_path) == ()
    folder = tmp_path / ".openhands" / "skills" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.md").write_bytes(b"\xffb")
    (folder / "large.md").write_text("x" * MAX_SKILL_BYTES)
    (folder / "README.md").write_text("not one")
    (tmp_path / ".openhands" / "microagents").mkdir()
    (tmp_path / ".openhands" / "microagents" / "a.md").write_text("A.")
    (tmp_path / ".openhands" / "microagents" / "folder.md").mkdir()
    first, second = skills_in(tmp_path)
    assert first == Skill(name="a", content="A.")
    assert second == Skill(name="deep/b", content="\ufffdb")


def test_a_home_that_cannot_be_looked_into_has_none(tmp_path: Path) -> None:
    assert skills_in(tmp_path / ("x" * 256)) == ()  # as in the home of somebody else, which root may enter
