"""The agent of a new conversation: kinds by name, preference, share, and the settings by their known names."""

from __future__ import annotations

import pytest

from broker.contract.agent_factory import (
    LEGACY_OF,
    AgentFactoryConfig,
    choose_agent,
    is_sdk_agent,
    kind_of,
    legacy_of,
    rollout_share_of,
    sdk_of,
)
from broker.contract.specs import ACP_AGENT, AgentSpec, SdkSpec
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from controller_worker.agents.agent import is_sdk_agent as runs_in_the_sdk
from controller_worker.agents.registry import AGENTS, create_agent


@pytest.mark.parametrize("name", LEGACY_OF)
def test_every_sdk_agent_can_be_created_and_has_legacy_counterpart(name: str) -> None:
    agent, legacy = create_agent(AgentSpec(name=name)), create_agent(AgentSpec(name=legacy_of(name)))
    assert (runs_in_the_sdk(agent), runs_in_the_sdk(legacy)) == (True, False)
    assert (kind_of(name), kind_of(legacy_of(name))) == ("sdk", "legacy")
    assert sdk_of(legacy_of(name)) == name
    assert agent.tools  # the SDK acts by tools alone


def test_the_names_and_the_classes_agree() -> None:
    names = [name for name in AGENTS if name != ACP_AGENT]  # which is nothing without a command
    assert {name for name in names if runs_in_the_sdk(create_agent(AgentSpec(name=name)))} == set(LEGACY_OF)
    assert not is_sdk_agent("LocAgent")
    assert (sdk_of("LocAgent"), legacy_of("LocAgent")) == ("LocAgent", "LocAgent")


def test_codeact_is_offered_the_same_in_both_loops() -> None:
    names = [
        [tool.name for tool in create_agent(AgentSpec(name=name)).tools] for name in ("CodeActAgent", "CodeActAgentSDK")
    ]
    assert names[0] == names[1]


def test_requested_sdk_agent_stays_with_its_own_settings() -> None:
    own = SdkSpec(timeout_seconds=1.0)
    assert choose_agent(AgentSpec(name="ReadOnlyAgentSDK", sdk=own), AgentFactoryConfig(), "c-1").sdk == own
    assert choose_agent(AgentSpec(name="ReadOnlyAgentSDK"), AgentFactoryConfig(), "c-1").sdk == SdkSpec()


@pytest.mark.parametrize("percent", [0.0, 10.0, 50.0, 100.0])
def test_a_share_of_conversations_is_chosen_always_the_same(percent: float) -> None:
    config = AgentFactoryConfig(prefer_sdk_agents=True, percent=percent)
    ids = [f"conversation-{number}" for number in range(1_000)]
    chosen = [cid for cid in ids if choose_agent(AgentSpec(), config, cid).name == "CodeActAgentSDK"]
    assert abs(len(chosen) / 10 - percent) < 5
    assert chosen == [cid for cid in ids if rollout_share_of(cid) < percent]


def test_settings_by_the_names_that_openhands_has() -> None:
    assert BrokerSettings.from_env({"OPENHANDS_USE_SDK_AGENTS": "true"}).prefer_sdk_agents
    assert not BrokerSettings.from_env({"OPENHANDS_USE_SDK_AGENTS": "0"}).prefer_sdk_agents
    with pytest.raises(UsageError, match="OPENHANDS_USE_SDK_AGENTS is 'maybe'"):
        BrokerSettings.from_env({"OPENHANDS_USE_SDK_AGENTS": "maybe"})
    assert not BrokerSettings.from_env(
        {"OPENHANDS_USE_SDK_AGENTS": "1", "DECKHANDS_PREFER_SDK_AGENTS": "0"}
    ).prefer_sdk_agents


def test_variables_choose_for_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECKHANDS_PREFER_SDK_AGENTS", "1")
    monkeypatch.setenv("DECKHANDS_SDK_AGENTS_PERCENT", "25")
    monkeypatch.setenv("DECKHANDS_SDK_TIMEOUT_SECONDS", "7")
    assert AgentFactoryConfig.from_env() == AgentFactoryConfig(prefer_sdk_agents=True, percent=25, timeout_seconds=7)
