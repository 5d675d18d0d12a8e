"""The survey of a workspace, and the skills that it makes the agent recall."""

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, EventSource, Observation, Parent, WorkspaceSpec
from broker.contract.observations import (
    CmdOutputObservation,
    ErrorObservation,
    OutcomeUnknownObservation,
    SurveyObservation,
)
from broker.contract.recall import MicroagentKnowledge, RecallObservation, RecallType
from broker.contract.skills import NO_SKILLS, SETUP_SCRIPT, parse_skills, read_workspace_files
from broker.contract.specs import Skill
from broker.contract.workspace_events import SurveyAction, WorkspaceOpenedObservation
from broker.contract.workspace_sources import GitSource
from controller_worker.core.concerns.survey import (
    INSTALL_HOOK,
    MAX_ATTEMPTS,
    parse_survey_skills,
    parse_survey_skills_in_turns,
)
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.core.recall import MAX_WORDS
from tests.controller_parts import Core, check_snapshots, messages_of
from tests.scenarios import play
from tests.trees import write_files
from tool_worker.host.configuration import DEFAULT_OUTPUT_LIMIT_BYTES
from tool_worker.tools.bash import RunCommand
from tool_worker.tools.survey import SurveyWorkspace
from tool_worker.tools.tool import HostRequest


def surveyed(folder: Path) -> Observation:
    """Return the tool's answer about a folder, with its command run by a real shell."""
    tool, action = SurveyWorkspace(), SurveyAction(id=4)
    command = tool.request(action).arguments["command"]
    ran = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stderr == ""
    answer = tool.observe(action, {"content": ran.stdout, "metadata": {"exit_code": 0}})
    return answer.model_copy(update={"cause": 4})


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    files = {
        "Agents.md": "Use tabs.\nAlways.",
        ".cursorrules": "Be brief.",
        ".openhands/microagents/repo.md": "---\nname: repo\n---\nThis is a shop.",
        ".openhands/skills/git hub.md": "---\ntriggers: [github]\n---\nÜse the API: \x1b[1m$(rm -rf /)",
        ".openhands/skills/README.md": "no skill",
        ".agents/skills/pdf/SKILL.md": "---\nname: pdf\ndescription: Reads PDFs.\n---\nRun scripts/read.py.",
        ".agents/skills/pdf/references/forms.md": "about forms",
        ".agents/skills/pdf/README.md": "no skill",
        "docs/AGENTS.md": "Write British English.",
        "node_modules/left-pad/AGENTS.md": "of a dependency",
        ".git/AGENTS.md": "of nothing",
    }
    return write_files(tmp_path, files)


def test_the_command_finds_what_there_is(workspace: Path) -> None:
    assert parse_survey_skills(surveyed(workspace)).skills == (
        Skill(name="cursorrules", content="Be brief."),
        Skill(name="agents", content="Use tabs.\nAlways."),
        Skill(name="repo", content="This is a shop."),
        Skill(name="git hub", content="Üse the API: \x1b[1m$(rm -rf /)", triggers=("github",)),
        Skill(
            name="pdf",
            content="",
            location=".agents/skills/pdf/SKILL.md",
            description="Reads PDFs.",
        ),
        Skill(name="agents:docs", content="Write British English.", paths=("docs/**",)),
    )


def test_the_command_and_the_check_of_a_folder_agree(workspace: Path) -> None:
    found = parse_skills(read_workspace_files(workspace))
    short = (skill.model_copy(update={"content": ""}) if skill.location else skill for skill in found.skills)
    assert replace(found, skills=tuple(short)) == parse_survey_skills(surveyed(workspace))


@pytest.mark.parametrize("path", [".openhands/skills/a\n/x.md", ".openhands/skills/a\nb.md", "a\nb/AGENTS.md"])
def test_names_with_line_feeds_end_no_survey(workspace: Path, path: str) -> None:
    before = parse_survey_skills(surveyed(workspace))
    write_files(workspace, {path: "odd"})
    assert parse_survey_skills(surveyed(workspace)) == before


def test_survey_fits_into_the_output_of_a_command(workspace: Path) -> None:
    for number in range(20):
        (workspace / ".openhands" / "skills" / f"z{number:02}.md").write_text("x" * 20_000)
    answer = surveyed(workspace)
    assert len(answer.content) < DEFAULT_OUTPUT_LIMIT_BYTES
    read = parse_survey_skills(answer)
    assert {"agents", "git hub", "z00"} <= {skill.name for skill in read.skills}
    (first,) = read.unreadable
    assert first.startswith(".openhands/skills/z0")
    assert "this file and the later ones are left out" in first


def test_damaged_lines_are_left_out() -> None:
    text = "deckhands-skill: QUdFTlRTLm1k\ndeckhands-skill: *** QQ==\ndeckhands-skill: QUdFTlRTLm1k QQ==\nnoise"
    assert parse_survey_skills(SurveyObservation(content=text)).skills == (Skill(name="agents", content="A"),)
    assert parse_survey_skills(ErrorObservation(content=text)) == NO_SKILLS


async def test_while_the_files_are_read_others_have_their_turn(tmp_path: Path) -> None:
    skills = tmp_path / ".openhands" / "skills"
    skills.mkdir(parents=True)
    for number in range(50):
        (skills / f"{number:02}.md").write_text(f"---\ntriggers: [word{number}]\n---\nText.")
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    answer = surveyed(tmp_path)
    other = asyncio.create_task(others())
    read = await parse_survey_skills_in_turns(answer)
    other.cancel()
    assert turns >= len(read.skills) == 50
    assert read == parse_survey_skills(answer)
    assert await parse_survey_skills_in_turns(ErrorObservation(content=answer.content)) == NO_SKILLS


def asked(task: str = "Fix it.", **spec: object) -> Core:
    """A conversation whose workspace was asked, and has not answered."""
    core = Core(task, surveys=True, agent=AgentSpec.model_validate(spec))
    assert core.run() == AwaitTools((4,))
    return core


def recalled(core: Core) -> list[RecallObservation]:
    return [event for event in core.events if isinstance(event, RecallObservation)]


def prompt_of(core: Core) -> str:
    return "".join(str(message.content) for message in messages_of(core.events))


def test_the_workspace_is_asked_before_the_first_message_is_recalled(workspace: Path) -> None:
    core = asked()
    assert core.event(4) == SurveyAction(id=4, timestamp=core.now)
    assert core.dispatched == [4]
    assert core.state.lifecycle.agent_state is AgentState.LOADING
    assert core.observe(4, surveyed(workspace)) == CallModel(1, 1)
    assert core.trace(after=4) == [
        "5 SurveyObservation(environment, cause 4)",
        "6 Recall(user) workspace_context",
        "7 SC running",
        "8 RecallObs(environment, cause 6)",
    ]
    found = core.event(8, RecallObservation)
    assert found.repo_instructions == "Be brief.\n\nUse tabs.\nAlways.\n\nThis is a shop."
    assert found.microagent_knowledge == ()


def test_a_skill_is_recalled_by_its_word_and_shown_once(workspace: Path) -> None:
    core = asked()
    core.observe(4, surveyed(workspace))
    play(core, "say(Push it to GitHub.), say(GitHub again.)")
    knowledge = recalled(core)[1]
    assert knowledge.recall_type is RecallType.KNOWLEDGE
    assert [(item.name, item.trigger) for item in knowledge.microagent_knowledge] == [("git hub", "github")]
    text = prompt_of(core)
    assert text.count("Üse the API") == 1
    assert "deckhands-skill" not in text


@pytest.mark.parametrize(
    "answer",
    [ErrorObservation(content="no workspace", cause=4), SurveyObservation(content="", cause=4)],
    ids=["error", "timeout"],
)
def test_a_workspace_that_cannot_be_asked_says_nothing(answer: Observation) -> None:
    core = asked()
    assert core.observe(4, answer) == CallModel(1, 1)
    (found,) = recalled(core)
    assert (found.repo_instructions, found.working_dir) == ("", "/srv/project")


def test_invalid_skill_file_is_named_and_others_count(workspace: Path) -> None:
    (workspace / ".openhands" / "skills" / "bad.md").write_text("---\na: !!bool foo\n---\nBad.")
    core = asked()
    assert core.observe(4, surveyed(workspace)) == CallModel(1, 1)
    (found,) = recalled(core)
    line = ".openhands/skills/bad.md: the front matter has a tag (!); leave it out, or quote the value"
    assert found.unreadable_skills == (line,)
    assert found.repo_instructions == "Be brief.\n\nUse tabs.\nAlways.\n\nThis is a shop."
    assert line in prompt_of(core)


def test_equal_named_own_skills_count_unless_workspace_has_one(workspace: Path) -> None:
    own = (Skill(name="style", content="Tabs."), Skill(name="style", content="Spaces."), Skill(name="x", content="X."))
    core = Core("go", agent=AgentSpec(skills=own))
    core.run()
    (found,) = recalled(core)
    assert found.repo_instructions == "Tabs.\n\nSpaces.\n\nX."
    (workspace / ".openhands" / "skills" / "style.md").write_text("Ours.")
    core = asked(skills=own)
    core.observe(4, surveyed(workspace))
    (found,) = recalled(core)
    assert "Tabs." not in found.repo_instructions
    assert "Spaces." not in found.repo_instructions
    assert found.repo_instructions.startswith("Ours.\n\nX.")


def test_words_beyond_the_limit_are_not_looked_for() -> None:
    names = range(MAX_WORDS // 100 + 1)
    skills = tuple(
        Skill(name=str(n), content="A.", triggers=(*(f"w{n}-{i}" for i in range(99)), f"last{n}")) for n in names
    )
    core = Core(" ".join(f"last{n}" for n in names), agent=AgentSpec(skills=skills))
    core.run()
    (found,) = recalled(core)
    assert [item.name for item in found.microagent_knowledge] == [str(n) for n in names][:-1]


def test_survey_with_unknown_outcome_is_repeated_within_bounds() -> None:
    core = asked()
    for _ in range(MAX_ATTEMPTS - 1):
        assert isinstance(lost(core), AwaitTools)
    assert lost(core) == CallModel(1, 1)


def lost(core: Core) -> Effect:
    """Let the outcome of the running action stay unknown."""
    action_id = core.state.survey.action_id
    return core.observe(action_id, OutcomeUnknownObservation(content="lost", cause=action_id))


@pytest.mark.parametrize("scripts", [[], [".openhands/setup.sh"]], ids=["survey", "script"])
def test_a_stop_waits_for_neither_survey_nor_script(scripts: list[str]) -> None:
    core = asked()
    if scripts:
        answered(core, *scripts)
    play(core, "stopped -> rest, states stopped, pending " if not scripts else "stopped -> rest")


def test_a_message_before_the_answer_is_recalled_with_it(workspace: Path) -> None:
    core = asked()
    core.say("on GitHub")
    assert core.run() == AwaitTools((4,))
    core.observe(4, surveyed(workspace))
    (found,) = recalled(core)
    assert found.recall_type is RecallType.WORKSPACE_CONTEXT
    assert [item.name for item in found.microagent_knowledge] == ["git hub"]


def test_an_agents_own_skills_need_no_survey() -> None:
    own = [
        Skill(name="style", content="Be kind."),
        Skill(name="git", content="Rebase.", triggers=("git",)),
        Skill(name="off", content="Never."),
    ]
    core = Core("Use git.", agent=AgentSpec(skills=tuple(own), disabled_microagents=("off",)))
    assert core.run() == CallModel(1, 1)
    (found,) = recalled(core)
    assert found.repo_instructions == "Be kind."
    assert found.microagent_knowledge == (MicroagentKnowledge(name="git", trigger="git", content="Rebase."),)


SETUP, HOOK = ".openhands/setup.sh", ".openhands/pre-commit.sh"
OWN = WorkspaceSpec(source=GitSource(url="https://example.org/shop.git"))


@pytest.mark.parametrize("names", [(), (SETUP,), (HOOK,), (SETUP, HOOK)])
def test_the_survey_names_the_scripts_of_a_repository(workspace: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (workspace / name).write_text("echo never run by the survey >&2; exit 1")
    (workspace / ".openhands" / "other.sh").touch()
    answer = surveyed(workspace)
    assert isinstance(answer, SurveyObservation)
    assert answer.scripts == names
    assert "deckhands-script" not in answer.content
    assert answer.sentence == "Found 7 files with instructions"


def answered(core: Core, *scripts: str) -> Effect:
    """Let the survey find these scripts."""
    action_id = core.state.survey.action_id
    return core.observe(action_id, SurveyObservation(is_complete=True, scripts=scripts, cause=action_id))


def ran(core: Core, exit_code: int) -> Effect:
    action = core.event(core.state.survey.action_id, CmdRunAction)
    request = RunCommand().request(action)
    assert isinstance(request, HostRequest)
    result = {"content": "said by the script", "metadata": {"exit_code": exit_code}}
    answer = RunCommand().observe(action, result)
    return core.observe(action.id, answer.model_copy(update={"cause": action.id}))


def test_setup_script_runs_hidden_once_before_the_first_step() -> None:
    core = asked()
    waits = answered(core, SETUP)
    assert isinstance(waits, AwaitTools)
    (action_id,) = waits.action_ids
    action = core.event(action_id, CmdRunAction)
    assert (action.command, action.source) == ("source .openhands/setup.sh", EventSource.ENVIRONMENT)
    assert (action.hidden, action.blocking, action.timeout, action.is_static) == (True, True, 600.0, False)
    assert core.dispatched[-1] == action_id
    assert ran(core, 0) == CallModel(1, 1)
    assert "setup.sh" not in prompt_of(core)
    play(core, "finish, say(Another task.) -> model 2")
    assert len([event for event in core.events if isinstance(event, CmdRunAction)]) == 1


def test_the_model_reads_how_a_setup_script_failed() -> None:
    core = asked()
    answered(core, SETUP)
    assert ran(core, 3) == CallModel(1, 1)
    text = prompt_of(core)
    assert "[`source .openhands/setup.sh` was run before your first step and did not succeed:]" in text
    assert "said by the script" in text
    assert "exit code 3" in text


def test_hook_is_installed_in_clones_not_personal_directories() -> None:
    core = Core("task", surveys=True, workspace=OWN)
    core.run()
    core.observe(4, WorkspaceOpenedObservation(content="open", cause=4))
    waits = answered(core, SETUP, HOOK)
    assert isinstance(waits, AwaitTools)
    waits = ran(core, 1)
    assert isinstance(waits, AwaitTools)
    action = core.event(waits.action_ids[0], CmdRunAction)
    assert "pre-commit" in action.command
    assert action.is_static
    assert ran(core, 0) == CallModel(1, 1)
    core = asked()
    assert answered(core, HOOK) == CallModel(1, 1)


def test_script_with_unknown_outcome_is_not_run_again() -> None:
    core = asked()
    answered(core, SETUP)
    assert lost(core) == CallModel(1, 1)


PARENT = Parent(conversation_id="parent", delegate_id=5, level=1)


@pytest.mark.parametrize(
    "options", [{"agent": AgentSpec(enable_cmd=False)}, {"parent": PARENT}], ids=["no shell", "delegate"]
)
def test_no_setup_without_a_shell_or_for_a_delegate(options: dict[str, Any]) -> None:
    core = Core("task", surveys=True, **options)
    core.run()
    assert answered(core, SETUP) == CallModel(1, 1)


def hooked(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_hook_runs_the_repository_script_and_keeps_the_existing(tmp_path: Path) -> None:
    assert hooked(tmp_path, "git init -q . && mkdir -p .openhands .git/hooks").returncode == 0
    (tmp_path / ".git/hooks/pre-commit").write_text("#!/bin/sh\necho earlier >> ran\n")
    (tmp_path / ".git/hooks/pre-commit").chmod(0o755)
    (tmp_path / HOOK).write_text("echo script >> ran; test ! -e bad")
    for _ in range(2):  # a second time changes nothing
        assert hooked(tmp_path, INSTALL_HOOK).stderr == ""
    commit = "git -c user.name=a -c user.email=a@b commit -qm x --allow-empty"
    assert hooked(tmp_path, commit).returncode == 0
    assert (tmp_path / "ran").read_text() == "earlier\nscript\n"
    (tmp_path / "bad").touch()
    assert hooked(tmp_path, commit).returncode != 0


def test_a_hook_is_written_through_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "clone"
    (folder / ".openhands").mkdir(parents=True)
    (folder / HOOK).touch()
    (folder / ".git").symlink_to(outside)
    hooked(folder, INSTALL_HOOK)
    assert list(outside.iterdir()) == []


def test_missing_skills_are_recalled_after_the_next_survey(workspace: Path) -> None:
    core = Core("Fix it.", surveys=True, skills=("/srv/skills",))
    assert core.run() == AwaitTools((4,))
    assert core.event(4, SurveyAction).skills == ("/srv/skills",)
    failed = SurveyObservation(
        cause=4, failure="Not allowed.", failure_code="skills_unavailable", scripts=(SETUP_SCRIPT,)
    )
    core.observe(4, failed)
    assert core.state.lifecycle.agent_state is AgentState.ERROR
    assert (core.state.lifecycle.last_error, core.state.lifecycle.error_code) == ("Not allowed.", "skills_unavailable")
    assert recalled(core) == []
    core.ask("running")
    waiting = core.run()
    assert isinstance(waiting, AwaitTools)
    (asked,) = waiting.action_ids
    found = surveyed(workspace).model_copy(
        update={"cause": asked, "scripts": (SETUP_SCRIPT,), "left_out": ("csv is left out",)}
    )
    core.observe(asked, found)
    waiting = core.run()
    assert isinstance(waiting, AwaitTools)
    (script,) = waiting.action_ids
    assert core.event(script, CmdRunAction).command == f"source {SETUP_SCRIPT}"
    core.observe(script, CmdOutputObservation(command="", content="", cause=script))
    (recall,) = recalled(core)
    assert "csv is left out" in (recall.unreadable_skills or ())
    assert recall.available_skills
    assert core.state.lifecycle.agent_state is AgentState.RUNNING


def test_failed_installation_of_skills_has_their_error_code() -> None:
    core = Core("Fix it.", surveys=True, skills=("/srv/skills",))
    core.run()
    core.observe(4, ErrorObservation(content="The disk is full.", cause=4))
    assert core.state.lifecycle.error_code == "skills_unavailable"


@pytest.mark.parametrize("ended", ["stopped", "error"])
def test_skills_wait_for_a_whole_survey(workspace: Path, ended: str) -> None:
    core = Core("Fix it.", surveys=True, skills=("/srv/skills",))
    core.run()
    if ended == "error":  # the survey is incomplete
        core.put(SurveyObservation(cause=4))
    else:
        core.ask(ended)
    assert core.run() == Rest()
    assert core.states()[-1] == ended
    assert core.state.lifecycle.error_code == ("skills_unavailable" if ended == "error" else "")
    assert recalled(core) == []
    core.ask("running")
    waiting = core.run()
    assert isinstance(waiting, AwaitTools)
    (asked,) = waiting.action_ids
    core.observe(asked, surveyed(workspace).model_copy(update={"cause": asked}))
    (recall,) = recalled(core)
    assert [skill.name for skill in recall.available_skills or ()] == ["pdf"]
    assert core.state.lifecycle.agent_state is AgentState.RUNNING
    check_snapshots(core)
