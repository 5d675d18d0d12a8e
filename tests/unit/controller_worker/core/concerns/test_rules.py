"""Skills that are read when they are needed: a list of them, and rules that hold for files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.contract.actions import CondensationAction
from broker.contract.double_texting import RolledBackObservation
from broker.contract.events import AgentSpec, EventSource, Observation
from broker.contract.file_events import FileReadAction, FileReadObservation
from broker.contract.recall import RecallAction, RecallObservation
from broker.contract.skills import matches_pattern, parse_skill
from broker.contract.specs import Skill
from controller_worker.core.effects import CallModel
from controller_worker.core.recall import (
    MAX_INSTRUCTION_CHARS,
    MAX_LISTED_CHARS,
    MAX_RULE_CHARS,
    MAX_RULES_CHARS,
)
from tests.controller_parts import Core, call, messages_of
from tests.scenarios import play
from tests.trees import write_files
from tests.unit.controller_worker.core.concerns.test_survey import asked, prompt_of, surveyed

LISTED = "When one of these skills fits the work, read its file first."


def write(folder: Path, files: dict[str, str]) -> Observation:
    """Write files and return the survey of the folder."""
    return surveyed(write_files(folder, files))


def recalls(core: Core) -> list[RecallObservation]:
    return [event for event in core.events if isinstance(event, RecallObservation)]


def view(core: Core, *paths: str) -> None:
    """Let the agent view files in one turn."""
    calls = (json.dumps({"command": "view", "path": path}) for path in paths)
    core.reply(*(call("str_replace_editor", arguments, f"v{n}") for n, arguments in enumerate(calls)))
    core.run()
    asked = [event for event in core.events if isinstance(event, FileReadAction)][-len(paths) :]
    for action in asked:
        core.observe(
            action.id,
            FileReadObservation(
                content="text", path=action.path, cause=action.id, tool_call_metadata=action.tool_call_metadata
            ),
        )


SKILL = "---\nname: {0}\ndescription: {1}\n---\nBody of {0}."


def test_folder_skill_is_listed_and_nothing_of_its_files_told(tmp_path: Path) -> None:
    core = asked()
    core.observe(
        4,
        write(
            tmp_path,
            {
                ".agents/skills/pdf/SKILL.md": SKILL.format("pdf", "Reads and\n  fills PDFs."),
                ".agents/skills/pdf/references/forms.md": "Secret of forms.",
                ".claude/skills/xls/SKILL.md": "# Sheets\n\nNo front matter.",
                ".openhands/skills/hidden/SKILL.md": "---\ndisable-model-invocation: true\n---\nHidden body.",
                ".openhands/skills/bad/SKILL.md": "---\na: !!x y\n---\nBad.",
                ".openhands/skills/bad/references/more.md": "More of bad.",
            },
        ),
    )
    (found,) = recalls(core)
    assert [(skill.name, skill.description) for skill in found.available_skills or ()] == [
        ("xls", "No front matter."),
        ("pdf", "Reads and fills PDFs."),
    ]
    text = prompt_of(core)
    assert LISTED in text
    assert "- pdf (.agents/skills/pdf/SKILL.md): Reads and fills PDFs." in text
    for untold in ("Body of pdf", "Secret", "Hidden", "More of bad"):
        assert untold not in text
    assert found.unreadable_skills is not None
    assert [line.partition(":")[0] for line in found.unreadable_skills] == [".openhands/skills/bad/SKILL.md"]


def test_folder_skill_with_triggers_is_recalled_as_well(tmp_path: Path) -> None:
    core = asked("Fill the PDF.")
    core.observe(4, write(tmp_path, {".agents/skills/pdf/SKILL.md": "---\ntriggers: [pdf]\n---\nBody."}))
    (found,) = recalls(core)
    assert [item.content for item in found.microagent_knowledge] == ["Read .agents/skills/pdf/SKILL.md first."]
    assert found.available_skills is not None


@pytest.mark.parametrize("count", [40, 200])
def test_prompt_stays_bounded_with_many_skills(tmp_path: Path, count: int) -> None:
    core = asked()
    long = {f".agents/skills/s{n}/SKILL.md": SKILL.format(f"s{n}", "word " * 180) for n in range(count)}
    core.observe(4, write(tmp_path, long))
    (found,) = recalls(core)
    assert found.available_skills is not None
    if count == 40:  # of 200, the survey has no room for all
        assert len(found.available_skills) == count
        assert found.unreadable_skills is None
    assert _count_chars(found) <= MAX_LISTED_CHARS
    assert len(prompt_of(core)) < 4 * MAX_LISTED_CHARS


def test_all_of_two_hundred_skills_are_listed(tmp_path: Path) -> None:
    core = asked()
    short = {f".agents/skills/s{n}/SKILL.md": SKILL.format(f"s{n}", "word " * 60) for n in range(200)}
    core.observe(4, write(tmp_path, short))
    (found,) = recalls(core)
    assert len(found.available_skills or ()) == 200
    assert _count_chars(found) <= MAX_LISTED_CHARS


def test_skills_with_endless_names_leave_the_prompt_bounded(tmp_path: Path) -> None:
    core = asked()
    endless = {f".agents/skills/s{n}/SKILL.md": SKILL.format(f"s{n}-" + "x" * 3_000, "Short.") for n in range(30)}
    core.observe(4, write(tmp_path, endless))
    (found,) = recalls(core)
    assert _count_chars(found) <= MAX_LISTED_CHARS
    listed = len(found.available_skills or ())
    assert 0 < listed < 30
    assert found.unreadable_skills is not None
    assert f"with {30 - listed} further SKILL.md files" in found.unreadable_skills[-1]


def _count_chars(found: RecallObservation) -> int:
    parts = [(skill.name, skill.description, skill.location) for skill in found.available_skills or ()]
    return sum(len(part) for texts in parts for part in texts)


def test_texts_that_are_always_shown_are_bounded(tmp_path: Path) -> None:
    core = asked()
    core.observe(4, write(tmp_path, {f".openhands/skills/a{n}.md": "text " * 8_000 for n in range(3)}))
    (found,) = recalls(core)
    assert len(found.repo_instructions) <= MAX_INSTRUCTION_CHARS
    assert [line.partition(":")[0] for line in found.unreadable_skills or ()] == ["a2"]


def test_texts_of_rules_are_bounded(tmp_path: Path) -> None:
    core = asked()
    names = [f"d{n}" for n in range(10)]
    core.observe(4, write(tmp_path, {f"{name}/AGENTS.md": "x" * 20_000 for name in names}))
    for name in (*names, *names):
        view(core, f"/srv/project/{name}/a.py")
        core.put(CondensationAction(forgotten_event_ids=(1,)))
    texts = [item.content for found in recalls(core) for item in found.microagent_knowledge]
    assert max(map(len, texts)) < MAX_RULE_CHARS + 200
    assert MAX_RULES_CHARS <= sum(map(len, texts)) < MAX_RULES_CHARS + MAX_RULE_CHARS + 200


def test_nested_instructions_are_never_shown_at_once(tmp_path: Path) -> None:
    core = asked()
    files = {"vendor/AGENTS.md": "---\nname: style\n---\nVendored.", "sub/AGENTS.md": "One.", "sub/AGENT.md": "Two."}
    core.observe(4, write(tmp_path, files))
    (found,) = recalls(core)
    assert found.repo_instructions == ""
    assert sorted(rule.patterns for rule in found.path_rules or ()) == [("sub/**",), ("sub/**",), ("vendor/**",)]


def test_nested_instructions_are_recalled_once_a_file_is_used(tmp_path: Path) -> None:
    core = asked()
    files = {
        "AGENTS.md": "Top.",
        "docs/CLAUDE.md": "Write British English.",
        "src/AGENTS.md": "Use tabs.",
        "src/deep/GEMINI.md": "Deep.",
    }
    core.observe(4, write(tmp_path, files))
    assert "tabs" not in prompt_of(core)
    view(core, "/srv/project/src/deep/a.py", "/srv/project/README.md")
    assert core.run() == CallModel(2, 1)
    found = recalls(core)[-1]
    assert [(item.name, item.trigger, item.path) for item in found.microagent_knowledge] == [
        ("agents:src", "src/**", "src/deep/a.py"),
        ("gemini:src/deep", "src/deep/**", "src/deep/a.py"),
    ]
    (question,) = [e for e in core.events if isinstance(e, RecallAction) and e.source is EventSource.ENVIRONMENT]
    assert found.cause == question.id
    last = messages_of(core.events)[-1]
    assert "These instructions hold for src/**; you have used src/deep/a.py.\nUse tabs." in str(last.content[0].text)
    count = len(recalls(core))
    view(core, "/srv/project/src/b.py")
    assert len(recalls(core)) == count
    core.put(CondensationAction(forgotten_event_ids=(1,)))
    view(core, "/srv/project/docs/b.md", "src/c.py")
    assert [item.name for item in recalls(core)[-1].microagent_knowledge] == ["agents:src", "claude:docs"][::-1]


def test_rules_of_front_matter_and_of_the_specification(tmp_path: Path) -> None:
    own = Skill(name="sql", content="Lower case.", paths=("*.sql",))
    core = asked(skills=(own,))
    core.observe(4, write(tmp_path, {".openhands/skills/py.md": "---\npaths: 'src/*.py, *.pyi'\n---\nTypes."}))
    view(core, "/workspace/db/x.sql", "/srv/project/y.pyi")
    assert [item.content for item in recalls(core)[-1].microagent_knowledge] == ["Lower case.", "Types."]


def test_rule_of_a_rolled_back_turn_is_recalled_again() -> None:
    own = Skill(name="sql", content="Lower case.", paths=("*.sql",))
    core = Core("go", agent=AgentSpec(skills=(own,)), double_texting="rollback")
    core.run()
    play(core, "finish(done), say(second)")
    view(core, "/workspace/db/x.sql")
    assert len(recalls(core)) == 2
    core.say("third")
    core.run()
    assert any(isinstance(event, RolledBackObservation) for event in core.events)
    count = len(recalls(core))
    view(core, "/workspace/db/x.sql")
    assert [item.content for one in recalls(core)[count:] for item in one.microagent_knowledge] == ["Lower case."]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.py", ["a.py", "x/y/a.py"], ["a.pyc", "x.py/a"]),
        ("/*.py", ["a.py"], ["x/a.py"]),
        ("src/**", ["src/a", "src/x/y"], ["srcs/a", "x/src/a"]),
        ("a/**/c.ts", ["a/c.ts", "a/b/b/c.ts"], ["a/c.tsx", "b/a/c.ts"]),
        ("**", ["a", "a/b"], []),
        ("a/?/b", ["a/x/b"], ["a/xx/b", "a//b"]),
        ("[[]x]/**", ["[x]/a"], ["x/a"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], other: list[str]) -> None:
    assert [path for path in (*matching, *other) if matches_pattern(path, pattern)] == matching


@pytest.mark.parametrize(
    ("given", "patterns"),
    [
        ("src/**/*.{ts,tsx}, *.py", ("src/**/*.ts", "src/**/*.tsx", "*.py")),
        ("./src/", ("src/**",)),
        ("{a,b}/{c,d}", ("a/c", "b/c", "a/d", "b/d")),
    ],
)
def test_patterns_of_front_matter(given: str, patterns: tuple[str, ...]) -> None:
    assert set(parse_skill("x", f"---\npaths: '{given}'\n---\nText").paths or ()) == set(patterns)


def test_braces_for_too_many_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="`paths` may have 20 patterns"):
        parse_skill("x", f"---\npaths: '{'{a,b,c,d,e,f}' * 30}'\n---\nText")


def test_hostile_pattern_and_path_cost_little() -> None:
    assert not matches_pattern("/".join("a" * 52), "/".join(["**", "a"] * 10))  # deeper than any match
    assert matches_pattern("/".join("a" * 50), "/".join(["**", "a"] * 10))
