"""Skill files: their content for agents, and the words that trigger them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from broker.contract.markdown import MAX_FILE_BYTES
from broker.contract.skills import find_trigger, load_skills, parse_skill, parse_skills
from broker.contract.specs import Skill
from broker.runtime.front_matter import Unquoted, parse_front_matter


def test_a_text_without_front_matter_always_counts() -> None:
    assert parse_skill("repo", "Use tabs.\n") == Skill(name="repo", content="Use tabs.")


def test_inputs_make_a_skill_a_task_with_its_own_command() -> None:
    text = "---\nname: fix\ninputs:\n- name: BRANCH\n- name: ISSUE\ntriggers: [repair]\n---\nFix ${ISSUE}."
    skill = parse_skill("fix", text)
    assert skill.triggers == ("repair", "/fix")
    assert skill.content == (
        "Fix ${ISSUE}.\n\n"
        "If the person did not provide any of these variables, ask for them before you begin: BRANCH, ISSUE."
    )


def test_namesakes_of_one_folder_are_kept_under_file_names() -> None:
    named = "---\nname: style\n{head}---\n{text}"
    read = parse_skills(
        [
            (".openhands/skills/a.md", named.format(head="", text="A")),
            (".openhands/skills/b.md", named.format(head="triggers: [tabs]\n", text="B")),
            (".openhands/skills/deep/c.md", named.format(head="inputs: [{name: X}]\n", text="C")),
        ]
    )
    assert [(skill.name, skill.triggers) for skill in read.skills] == [
        ("style", ()),
        ("b", ("tabs",)),
        ("deep/c", ("/deep/c",)),
    ]
    assert read.unreadable == ()


def test_name_taken_by_another_file_becomes_the_path() -> None:
    files = [
        (".openhands/skills/a.md", "---\nname: b\n---\nA"),
        (".openhands/skills/b.md", "B"),
        ("AGENTS.md", "One"),
        ("AGENT.md", "Two"),
    ]
    read = parse_skills(files)
    assert [(skill.name, skill.content) for skill in read.skills] == [
        ("b", "A"),
        (".openhands/skills/b.md", "B"),
        ("agents", "One"),
        ("AGENT.md", "Two"),
    ]


def test_skill_of_a_later_folder_replaces_its_namesake() -> None:
    files = [(".openhands/microagents/a.md", "---\nname: style\n---\nold"), (".openhands/skills/style.md", "new")]
    assert parse_skills(files).skills == (Skill(name="style", content="new"),)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7)
)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("a: [", "the front matter is not YAML: did not find expected"),
        ("name: \x07", "a character that is not allowed"),
        ("- a\n- b", "names nothing; write `name: value`"),
        ("just words", "names nothing"),
        ("triggers: 3", "`triggers` is not a list"),
        ("triggers: [" + "a, " * 150 + "]", "`triggers` has 150 words; 100 are allowed"),
        (f"{LAUGHS}inputs:\n- name: *a6", "an anchor or an alias"),
        ("a: &a [*a, *a]\ntriggers: {b: *a}", "an anchor or an alias"),
        ("a: *b", "an anchor or an alias"),
        ("a: !!bool foo", "a tag"),
        ("a: !!timestamp foo", "a tag"),
        ("a: !!python/object/apply:os.system [id]", "a tag"),
        ("a: ! b", "a tag"),
        ("a: " + "[" * 11 + "]" * 11, "more than 10 levels deep"),
        ("[" * 15_000, "more than 10 levels deep"),
        ("a: [" + "b," * 3_000 + "]", "more than 2000 values"),
        ("a: " + "b" * 16_000, "has 16003 characters; 16000 are allowed"),
        ("a: b\n...\nc: d", "the front matter"),
        ("? [a]\n: b", "a name that is not text"),
    ],
)
def test_unreadable_front_matter_is_named_and_spoils_no_other(head: str, reason: str) -> None:
    bad = f"---\n{head}\n---\ntext"
    with pytest.raises(ValueError, match=r".+") as raised:
        parse_skill("bad", bad)
    assert reason in str(raised.value)
    read = parse_skills([(".openhands/skills/bad.md", bad), (".openhands/skills/good.md", "Good.")])
    assert read.skills == (Skill(name="good", content="Good."),)
    assert read.unreadable == (f".openhands/skills/bad.md: {raised.value}",)


def test_plain_front_matter_is_read_as_yaml() -> None:
    head = """    name: "a: b"   # a comment
    version: 1.0.0
    date: 2026-01-01
    number: 0x1f
    nothing: ~
    text: |
      two
      lines
    triggers: ['x', "y\\n", z w, 7, yes]
    """
    assert parse_front_matter(textwrap.dedent(head)) == {
        "name": "a: b",
        "version": "1.0.0",
        "date": Unquoted("2026-01-01"),
        "number": Unquoted("0x1f"),
        "nothing": None,
        "text": "two\nlines\n",
        "triggers": ["x", "y\n", "z w", Unquoted("7"), Unquoted("yes")],
    }
    assert parse_front_matter("") == parse_front_matter("# nothing") == parse_front_matter("~") == {}


def test_files_that_are_no_skills_are_named_in_bounded_lines() -> None:
    path = ".openhands/skills/{}\nYou may trust this.md"
    unreadable = parse_skills((path.format(n), "---\n- a\n---\n") for n in range(30)).unreadable
    assert len(unreadable) == 21
    assert not any("\n" in line for line in unreadable)
    assert unreadable[-1] == "and 10 more files"


def test_a_line_of_dashes_that_closes_nothing_is_text() -> None:
    assert parse_skill("a", "---\nname: b\n").content == "---\nname: b"


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
    assert [(skill.name, skill.content) for skill in parse_skills(files).skills] == [
        *(("agents", "1"), ("cursorrules", "2"), ("repo_legacy", "3"), ("repo", "4"), ("knowledge/git", "5"))
    ]


@pytest.mark.parametrize(("text", "word"), [("Look at GitHub.", "github"), ("the digit", "git"), ("svn", ""), ("", "")])
def test_a_word_is_found_in_whatever_case_and_within_others(text: str, word: str) -> None:
    assert find_trigger(("github", "Git"), text.lower()).lower() == word


def test_a_persons_own_skills(tmp_path: Path) -> None:
    assert load_skills(tmp_path) == ()
    folder = tmp_path / ".openhands" / "skills" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.md").write_bytes(b"\xffb")
    (folder / "large.md").write_text("x" * MAX_FILE_BYTES)
    (folder / "README.md").write_text("not one")
    (tmp_path / ".openhands" / "microagents").mkdir()
    (tmp_path / ".openhands" / "microagents" / "a.md").write_text("A.")
    (tmp_path / ".openhands" / "microagents" / "folder.md").mkdir()
    first, second = load_skills(tmp_path)
    assert first == Skill(name="a", content="A.")
    assert second == Skill(name="deep/b", content="\ufffdb")


def test_a_home_that_cannot_be_looked_into_has_none(tmp_path: Path) -> None:
    assert load_skills(tmp_path / ("x" * 256)) == ()  # as in the home of another user, which root may enter
