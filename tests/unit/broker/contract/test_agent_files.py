"""Files that define agents: their fields, and the rights that a delegate keeps of its parent's."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from broker.contract.agent_files import (
    MAX_INSTRUCTION_CHARS,
    AgentFile,
    load_agent_files,
    parse_agent_file,
)
from broker.contract.policies import ConfirmationPolicy
from broker.contract.skills import parse_skills
from broker.contract.specs import AgentSpec, GoalSpec, Limits, LLMSpec
from broker.contract.tool_specs import ToolOffer

REVIEWER = """\
---
name: reviewer
description: >
  Reviews a diff
  for mistakes.
tools: Read, Grep, Bash(git diff:*)
model: acme/large
permission_mode: always_confirm
max_iteration_per_run: 5
max_budget_per_run: 0.5
color: blue
---
# Review
Look for mistakes.
"""
SCHEMA = {"type": "object"}
DOCS = ToolOffer(key="docs/search", name="docs_search", parameters=SCHEMA, runner="mcp")
ADD = ToolOffer(key="add", name="add", parameters=SCHEMA)
PARENT = AgentSpec(
    llm=LLMSpec(model="acme/small"),
    goal=GoalSpec(check="true"),
    enable_delegation=True,
    delegates={"scout": AgentSpec()},
    tools=(DOCS, ADD),
    system_prompt_suffix="Be brief.",
)


def define(head: str, text: str = "Do it.") -> AgentFile:
    return parse_agent_file(".claude/agents/one.md", f"---\n{textwrap.dedent(head)}\n---\n{text}")


def make(head: str, parent: AgentSpec = PARENT) -> AgentSpec:
    return define(head).make_spec(parent, model=None)


def test_all_used_fields_are_read() -> None:
    assert parse_agent_file("x.md", REVIEWER) == AgentFile(
        name="reviewer",
        description="Reviews a diff for mistakes.",
        instructions="# Review\nLook for mistakes.",
        tools=frozenset({"read", "grep", "bash"}),
        model="acme/large",
        mode="always",
        max_iterations=5,
        max_budget_usd=0.5,
    )


def test_name_and_description_follow_from_the_file() -> None:
    found = parse_agent_file(".agents/agents/tidy.md", "# Tidy\nTidies up.\nAlways.")
    assert (found.name, found.description) == ("tidy", "Tidies up.")


@pytest.mark.parametrize("name", ["inherit", "sonnet", "opus", "haiku"])
def test_short_names_of_models_mean_the_parents(name: str) -> None:
    assert define(f"model: {name}").model == ""


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("name: a b", "`name` is 'a b'"),
        (f"name: {'x' * 65}", "`name` is 'xxx"),
        ("permission_mode: never", "`permission_mode` is 'never'; it may be always_confirm, confirm_risky, never"),
        ("tools: {a: b}", "`tools` is neither a list nor text"),
        (f"tools: [{'a, ' * 101}]", "`tools` has 101 names; 100 are allowed"),
        ("max_iteration_per_run: many", "`max_iteration_per_run` is"),
        ("max_iteration_per_run: 0", "it must be a number above 0"),
        ("max_budget_per_run: -1", "it must be a number above 0"),
        ("max_budget_per_run: inf", "it must be a number above 0"),
        ("max_budget_per_run: nan", "it must be a number above 0"),
        ("a: [", "YAML"),
    ],
)
def test_an_invalid_file_is_left_out_with_its_reason(head: str, said: str) -> None:
    read = parse_skills([(".agents/agents/one.md", f"---\n{head}\n---\nText"), ("AGENTS.md", "Use tabs.")])
    assert not read.agents
    assert [skill.name for skill in read.skills] == ["agents"]
    (reason,) = read.unreadable
    assert reason.startswith(".agents/agents/one.md: ")
    assert said in reason


def test_instructions_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16,001 characters; 16,000 are allowed"):
        define("", "x" * (MAX_INSTRUCTION_CHARS + 1))


def test_a_later_folder_replaces_a_namesake() -> None:
    files = [(f"{folder}/agents/one.md", folder) for folder in (".claude", ".openhands", ".agents")]
    read = parse_skills([*files, (".claude/agents/deep/two.md", "2"), (".agents/agents/README.md", "no agent")])
    assert {path: agent.instructions for path, agent in read.agents.items()} == {".agents/agents/one.md": ".agents"}


def test_without_fields_it_has_its_parents_tools_but_no_delegates() -> None:
    spec = make("")
    assert spec == PARENT.model_copy(
        update={
            "goal": None,
            "enable_delegation": False,
            "delegates": {},
            "system_prompt_suffix": "Be brief.\n\nDo it.",
        }
    )


@pytest.mark.parametrize(
    ("head", "parent", "has"),
    [
        ("tools: [Bash]", {}, {"enable_cmd"}),
        (
            "tools: [TerminalTool, FileEditorTool, TaskTrackerTool]",
            {},
            {"enable_cmd", "enable_editor", "enable_plan_mode"},
        ),
        ("tools: [terminal, file_editor]", {}, {"enable_cmd", "enable_editor"}),
        ("tools: [Edit, Grep]", {}, {"enable_editor", "enable_search"}),
        ("disallowedTools: Bash, Write", {}, {"enable_search", "enable_plan_mode"}),
        ("tools: [Bash, browser_tool_set, apply_patch, execute_ipython_cell]", {"enable_cmd": False}, set()),
        ("", {"enable_cmd": False, "enable_editor": False}, {"enable_search", "enable_plan_mode"}),
    ],
)
def test_a_file_takes_tools_away_and_adds_none(head: str, parent: dict[str, bool], has: set[str]) -> None:
    spec = make(head, AgentSpec(**parent))
    flags = ("cmd", "editor", "patch", "search", "plan_mode", "jupyter", "browsing")
    assert {f"enable_{flag}" for flag in flags if getattr(spec, f"enable_{flag}")} == has


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        ("tools: [Bash, mcp__docs__search]", (DOCS,)),
        ("tools: [docs_search, Edit]", (DOCS,)),
        ("tools: [Bash, add, subtract]", (ADD,)),
        ("disallowedTools: [add]", (DOCS,)),
        ("tools: Bash", ()),
    ],
)
def test_offered_tools_are_kept_by_either_name(head: str, kept: tuple[ToolOffer, ...]) -> None:
    assert make(head).tools == kept


@pytest.mark.parametrize(
    ("parent", "name"),
    [
        ({}, "ReadOnlyAgent"),
        ({"enable_editor": False}, "ReadOnlyAgent"),
        ({"enable_editor": False, "enable_cmd": False}, "CodeActAgent"),  # the parent cannot read files either
        ({"name": "my_agent"}, "my_agent"),
    ],
)
def test_reading_agent_gets_a_tool_that_cannot_write(parent: dict[str, object], name: str) -> None:
    assert make("tools: Read, Glob", AgentSpec(**parent)).name == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "parent", "wanted"),
    [
        ("always_confirm", "never", "always"),
        ("always_confirm", "risky", "always"),
        ("confirm_risky", "never", "risky"),
        ("confirm_risky", "always", "always"),
        ("confirm_risky", "my_policy", "my_policy"),
        ("never_confirm", "always", "always"),
        ("never_confirm", "risky", "risky"),
    ],
)
def test_confirmations_are_only_added(mode: str, parent: str, wanted: str) -> None:
    spec = make(f"permission_mode: {mode}", AgentSpec(confirmation=ConfirmationPolicy(mode=parent)))
    assert spec.confirmation.mode == wanted


def test_limits_are_only_lowered() -> None:
    agent = parse_agent_file("x.md", REVIEWER)
    assert agent.limit(Limits(max_iterations=50)) == Limits(max_iterations=5, max_budget_usd=0.5)
    low = Limits(max_iterations=2, max_budget_usd=0.1)
    assert agent.limit(low) == low


def test_own_files_are_read_without_links_and_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / ".agents" / "agents"
    folder.mkdir(parents=True)
    (folder / "a.md").write_text("A")
    (folder / "bad.md").write_text("---\nname: x y\n---\n")
    (folder / "long.md").write_text("x" * MAX_INSTRUCTION_CHARS)
    (folder / "other.txt").write_text("no agent")
    (folder / "link.md").symlink_to(folder / "a.md")
    assert [agent.name for agent in load_agent_files(tmp_path)] == ["a"]
    assert "bad.md: `name` is 'x y'" in caplog.text
    assert "The agent long is left out: all together exceed 16000 characters" in caplog.text
