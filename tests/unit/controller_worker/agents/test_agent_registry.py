"""Agents of installed packages, by entry point."""

from pathlib import Path

import pytest

from broker.contract.actions import MessageAction
from broker.contract.events import AgentSpec, ModelReply, WorkspaceSpec
from broker.runtime.errors import UsageError
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.registry import create_agent
from tests.entry_points import install_package

MODULE = """
from controller_worker.agents.codeact import CodeActAgent


class Poet(CodeActAgent):
    def system_prompt(self, workspace):
        return "You write verse."
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {"Poet": "Poet", "Lost": "Nobody", "CodeActAgent": "Poet"}
    install_package(tmp_path, monkeypatch, "poets_of_a_package", MODULE, {"deckhands.agents": agents})


def test_an_agent_of_a_package_is_found_by_its_name() -> None:
    agent = create_agent(AgentSpec(name="Poet"))
    assert agent.system_prompt(WorkspaceSpec()) == "You write verse."
    assert agent.events_of(ModelReply(id=7, content="Roses.")) == [
        MessageAction(content="Roses.", source="agent", wait_for_response=True)
    ]


def test_package_cannot_replace_a_built_in_agent() -> None:
    assert type(create_agent(AgentSpec())) is CodeActAgent


def test_a_package_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(UsageError, match=r"The agent .Lost. cannot be loaded: AttributeError: .*Nobody"):
        create_agent(AgentSpec(name="Lost"))


def test_an_unknown_name_is_answered_with_all_there_are() -> None:
    with pytest.raises(UsageError) as raised:
        create_agent(AgentSpec(name="NoSuchAgent"))
    assert (
        raised.value.remedy
        == "Known agents: BrowsingAgent, BrowsingAgentSDK, ChaosAgent, CheckAgent, CodeActAgent, CodeActAgentSDK, DummyAgent, LocAgent, LongWorkAgent, Lost, "
        "PlanningAgent, Poet, ReadOnlyAgent, ReadOnlyAgentSDK, VisualBrowsingAgent, acp:COMMAND."
    )
