"""Confirmation policies and risk analyzers of installed packages, by entry point."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from broker.contract.actions import CmdRunAction, RiskyAction
from broker.contract.events import ActionSecurityRisk, AgentSpec, ConfirmationStatus, WorkspaceSpec
from broker.contract.policies import ConfirmationPolicy
from broker.runtime.errors import UsageError
from controller_worker.agents.registry import create_agent
from controller_worker.core.effects import AwaitTools, Rest
from controller_worker.security.assessment import assess, list_plugins
from tests.controller_parts import Core, bash, check_replay
from tests.entry_points import install_package

MODULE = """
from broker.contract.events import ActionSecurityRisk


class Words:
    def __init__(self, settings):
        self.words = settings["words"]

    def needs_confirmation(self, action, risk):
        return any(word in action.command for word in self.words)


class Lengths:
    def __init__(self, settings):
        self.limit = settings.get("limit", 5)

    def risk(self, action, workspace):
        return ActionSecurityRisk.HIGH if len(action.command) > self.limit else ActionSecurityRisk.LOW


class Broken:
    def __init__(self, settings):
        pass

    def needs_confirmation(self, action, risk):
        raise RuntimeError("no idea")

    def risk(self, action, workspace):
        return "very risky"
"""
HERE = WorkspaceSpec(path="/srv/project")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {
        "deckhands.confirmation_policies": {"words": "Words", "broken": "Broken", "never": "Broken"},
        "deckhands.risk_analyzers": {"lengths": "Lengths", "broken": "Broken"},
    }
    install_package(tmp_path, monkeypatch, "policies_of_a_package", MODULE, groups)


def status(policy: ConfirmationPolicy, command: str) -> tuple[ConfirmationStatus, ActionSecurityRisk]:
    (action,) = assess([CmdRunAction(command=command)], policy, HERE)
    assert isinstance(action, RiskyAction)
    return action.confirmation_state, action.security_risk


WAITS, RUNS = ConfirmationStatus.AWAITING_CONFIRMATION, ConfirmationStatus.CONFIRMED


def test_a_policy_of_a_package_decides_by_its_settings() -> None:
    policy = ConfirmationPolicy(mode="words", settings={"words": ["deploy"]})
    assert status(policy, "make deploy")[0] is WAITS
    assert status(policy, "rm -rf /")[0] is RUNS


def test_an_analyzer_of_a_package_says_the_risk() -> None:
    policy = ConfirmationPolicy(mode="risky", analyzer="lengths", settings={"limit": 10})
    assert status(policy, "ls") == (RUNS, ActionSecurityRisk.LOW)
    assert status(policy, "ls a b c d e f") == (WAITS, ActionSecurityRisk.HIGH)


def test_one_that_fails_asks_the_person() -> None:
    assert status(ConfirmationPolicy(mode="broken", analyzer="none"), "ls")[0] is WAITS
    assert status(ConfirmationPolicy(mode="risky", analyzer="broken"), "ls") == (WAITS, ActionSecurityRisk.HIGH)


def test_a_package_cannot_replace_what_is_built_in() -> None:
    assert status(ConfirmationPolicy(mode="never"), "rm -rf /")[0] is RUNS
    assert ConfirmationPolicy(mode="never", analyzer="shell").plugins == ()


def test_a_conversation_with_a_plug_in_asks_and_replays_alike() -> None:
    policy = ConfirmationPolicy(mode="words", settings={"words": ["deploy"]})
    core = Core(agent=AgentSpec(confirmation=policy))
    core.run()
    assert core.reply(bash("make deploy")) == Rest()
    core.ask("user_confirmed")
    assert isinstance(core.run(), AwaitTools)
    check_replay(core)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ConfirmationPolicy(mode="nosuch"), "There is no confirmation policy named 'nosuch'"),
        (ConfirmationPolicy(mode="always", analyzer="nosuch"), "There is no risk analyzer named 'nosuch'"),
        (ConfirmationPolicy(mode="words"), "The confirmation policy 'words' cannot be loaded: KeyError"),
    ],
)
def test_what_is_not_there_is_no_agent_at_all(policy: ConfirmationPolicy, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_agent(AgentSpec(confirmation=policy))


def test_workers_say_which_there_are() -> None:
    assert list_plugins()["deckhands.risk_analyzers"] == ["broken", "lengths"]


@pytest.mark.parametrize(
    "fields", [{"mode": ""}, {"mode": "a b"}, {"analyzer": "x" * 65}, {"settings": {"a": "b" * 10_001}}]
)
def test_invalid_policy_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ConfirmationPolicy.model_validate(fields)


def test_policy_without_settings_keeps_its_wire_form() -> None:
    wire = AgentSpec().model_dump(mode="json", exclude_none=True)["confirmation"]
    assert wire == {"mode": "never", "threshold": "HIGH", "confirm_unknown": True, "analyzer": "ensemble"}
