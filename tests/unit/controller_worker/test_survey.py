"""The survey of a workspace, and what is recalled because of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from broker.actions import RecallType, SurveyAction
from broker.agent_state import AgentState
from broker.events import AgentSpec, Observation
from broker.observations import (
    ErrorObservation,
    MicroagentKnowledge,
    OutcomeUnknownObservation,
    RecallObservation,
    SurveyObservation,
)
from broker.specs import Skill
from controller_worker.effects import AwaitTools, CallModel
from controller_worker.memory.conversation_memory import ConversationMemory, PromptOptions
from controller_worker.memory.survey import MAX_ATTEMPTS, skills_from
from tests.controller_parts import Core, messages_of
from tool_worker.tools.survey import SurveyWorkspace


def surveyed(folder: Path) -> Observation:
    """What the tool says of a folder, its command run by a real shell."""
    tool, action = SurveyWorkspace(), SurveyAction(id=4)
    command = tool.request(action).arguments["command"]
    ran = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
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
        "docs/AGENTS.md": "of another folder",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_command_finds_what_there_is(workspace: Path) -> None:
    assert skills_from(surveyed(workspace)) == (
        Skill(name="cursorrules", content="Be brief."),
        Skill(name="agents", content="Use tabs.\nAlways."),
        Skill(name="repo", content="This is a shop."),
        Skill(name="git hub", content="Üse the API: \x1b[1m$(rm -rf /)", triggers=("github",)),
    )


def test_a_workspace_that_says_nothing(tmp_path: Path) -> None:
    assert skills_from(surveyed(tmp_path)) == ()


def test_damaged_lines_are_left_out() -> None:
    text = "deckhands-skill: QUdFTlRTLm1k\ndeckhands-skill: *** QQ==\ndeckhands-skill: QUdFTlRTLm1k QQ==\nnoise"
    assert skills_from(SurveyObservation(content=text)) == (Skill(name="agents", content="A"),)
    assert skills_from(ErrorObservation(content=text)) == ()


def asked(task: str = "Mend it.", **spec: object) -> Core:
    """A conversation whose workspace was asked, and has not answered."""
    core = Core(task, surveys=True, agent=AgentSpec.model_validate(spec))
    assert core.run() == AwaitTools((4,))
    return core


def test_the_workspace_is_asked_before_the_first_message_is_recalled(workspace: Path) -> None:
    core = asked()
    assert core.event(4) == SurveyAction(id=4, timestamp=core.now)
    assert core.dispatched == [4]
    assert core.state.agent_state is AgentState.LOADING
    assert core.observe(4, surveyed(workspace)) == CallModel(1, 1)
    assert core.trace(after=4) == [
        "5 SurveyObservation(environment, cause 4)",
        "6 Recall(user) workspace_context",
        "7 SC running",
        "8 RecallObs(environment, cause 6)",
    ]
    found = core.event(8)
    assert isinstance(found, RecallObservation)
    assert found.repo_instructions == "Be brief.\n\nUse tabs.\nAlways.\n\nThis is a shop."
    assert found.microagent_knowledge == ()


def test_a_skill_is_recalled_by_its_word_and_shown_once(workspace: Path) -> None:
    core = asked()
    core.observe(4, surveyed(workspace))
    core.say("Push it to GitHub.")
    core.run()
    knowledge = [event for event in core.events if isinstance(event, RecallObservation)][1]
    assert knowledge.recall_type is RecallType.KNOWLEDGE
    assert [(item.name, item.trigger) for item in knowledge.microagent_knowledge] == [("git hub", "github")]
    core.say("GitHub, please.")
    core.run()
    text = "".join(str(message.content) for message in messages_of(core.events))
    assert text.count("Üse the API") == 1
    assert "deckhands-skill" not in text


@pytest.mark.parametrize(
    "answer",
    [
        ErrorObservation(content="no workspace", cause=4),
        SurveyObservation(content="", cause=4),
    ],
    ids=["error", "timeout"],
)
def test_a_workspace_that_cannot_be_asked_says_nothing(answer: Observation) -> None:
    core = asked()
    assert core.observe(4, answer) == CallModel(1, 1)
    (found,) = (event for event in core.events if isinstance(event, RecallObservation))
    assert (found.repo_instructions, found.working_dir) == ("", "/srv/project")


def test_when_nobody_knows_what_became_of_the_question_it_is_asked_again_and_not_for_ever() -> None:
    core = asked()
    for _ in range(MAX_ATTEMPTS - 1):
        effect = core.observe(core.state.survey.action_id, OutcomeUnknownObservation(cause=core.state.survey.action_id))
        assert isinstance(effect, AwaitTools)
    last = core.state.survey.action_id
    assert core.observe(last, OutcomeUnknownObservation(cause=last)) == CallModel(1, 1)


def test_a_stop_does_not_wait_for_the_answer() -> None:
    core = asked()
    core.ask("stopped")
    core.run()
    assert core.state.agent_state is AgentState.STOPPED
    assert core.state.pending == ()


def test_a_message_before_the_answer_is_recalled_with_it(workspace: Path) -> None:
    core = asked()
    core.say("on GitHub")
    assert core.run() == AwaitTools((4,))
    core.observe(4, surveyed(workspace))
    (found,) = (event for event in core.events if isinstance(event, RecallObservation))
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
    (found,) = (event for event in core.events if isinstance(event, RecallObservation))
    assert found.repo_instructions == "Be kind."
    assert found.microagent_knowledge == (MicroagentKnowledge(name="git", trigger="git", content="Rebase."),)


def test_a_workspaces_skill_takes_the_place_of_an_agents_own(workspace: Path) -> None:
    core = asked(skills=[{"name": "agents", "content": "Use spaces."}])
    core.observe(4, surveyed(workspace))
    (found,) = (event for event in core.events if isinstance(event, RecallObservation))
    assert "Use tabs." in found.repo_instructions
    assert "Use spaces." not in found.repo_instructions


def test_a_new_workspace_is_not_asked() -> None:
    core = Core("task", surveys=True)
    created = core.events[0].model_copy(update={"workspace": core.state.workspace.model_copy(update={"path": None})})
    fresh = Core(None, surveys=True)
    fresh.events, fresh.state = [], type(fresh.state)()
    fresh.put(created, core.events[1])
    assert fresh.run() == CallModel(1, 1)


def test_recalls_are_not_shown_where_they_are_switched_off() -> None:
    recall = RecallObservation(id=1, recall_type=RecallType.WORKSPACE_CONTEXT, repo_instructions="Use tabs.")
    memory = ConversationMemory(PromptOptions(shows_recalls=False))
    memory.add(recall)
    assert memory.messages() == []
