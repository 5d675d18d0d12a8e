"""The source of an action's risk, and the actions that need a confirmation."""

from typing import Any

import pytest

from broker.contract.actions import AgentThinkAction, CmdRunAction, MCPAction, RiskyAction
from broker.contract.browser_events import BrowseURLAction
from broker.contract.code_search import CodeSearchAction
from broker.contract.events import ActionSecurityRisk, ConfirmationStatus, WorkspaceSpec
from broker.contract.file_events import ApplyPatchAction, FileEditAction, FileReadAction, FileWriteAction
from broker.contract.policies import ConfirmationPolicy
from broker.contract.session_events import IPythonRunCellAction
from controller_worker.security.assessment import assess, find_risk, needs_confirmation, parse_risk
from controller_worker.security.path_risk import Rating

LOW, MEDIUM, HIGH = ActionSecurityRisk.LOW, ActionSecurityRisk.MEDIUM, ActionSecurityRisk.HIGH
UNKNOWN = ActionSecurityRisk.UNKNOWN
HERE = WorkspaceSpec(path="/srv/project")


@pytest.mark.parametrize(
    ("action", "risk"),
    [
        (CmdRunAction(command="ls"), LOW),
        (CmdRunAction(command="touch x", cwd="src"), LOW),
        (CmdRunAction(command="touch x", cwd="/etc"), HIGH),
        (CmdRunAction(command="tee pre-commit", cwd=".git/hooks"), HIGH),
        (CmdRunAction(command="", is_input=True), LOW),
        (CmdRunAction(command="C-c", is_input=True), LOW),
        (CmdRunAction(command="y", is_input=True), HIGH),
        (FileReadAction(path="/srv/project/a.py"), LOW),
        (FileReadAction(path="/etc/os-release"), MEDIUM),
        (FileReadAction(path="/home/me/.ssh/id_ed25519"), HIGH),
        (FileEditAction(path="/srv/project/a.py"), LOW),
        (FileEditAction(path="/srv/project/../other/a.py"), HIGH),
        (FileEditAction(path="/srv/project/.git/hooks/pre-commit"), HIGH),
        (FileWriteAction(path="/etc/hosts", content=""), HIGH),
        (FileWriteAction(path="/srv/projects/a", content=""), HIGH),
        (CmdRunAction(command="", control="kill", terminal="job-1"), LOW),
        (CmdRunAction(command="rm -rf /", is_background=True), HIGH),
        (CodeSearchAction(question="grep", arguments={"pattern": "x"}), LOW),
        (CodeSearchAction(question="grep", arguments={"pattern": "x", "path": "/home/me/.ssh"}), HIGH),
        (ApplyPatchAction(patch="*** Begin Patch\n*** Add File: a.py\n+x\n*** End Patch"), LOW),
        (ApplyPatchAction(patch="--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"), LOW),
        (ApplyPatchAction(patch="--- a/a.py\n+++ b//etc/hosts\n@@ -1 +1 @@\n-x\n+y\n"), HIGH),
        (ApplyPatchAction(patch="--- /dev/null\n+++ b/a.py\n@@ -0,0 +1 @@\n+y\n"), LOW),
        (ApplyPatchAction(patch="*** Begin Patch\n*** Update File: a\n*** Move to: ../b\n*** End Patch"), HIGH),
        (ApplyPatchAction(patch="nonsense"), HIGH),
        (BrowseURLAction(url="https://example.com"), MEDIUM),
        (IPythonRunCellAction(code="1"), HIGH),
        (MCPAction(name="t"), HIGH),
    ],
)
def test_what_an_action_shows(action: RiskyAction, risk: ActionSecurityRisk) -> None:
    assert parse_risk(action, "/srv/project").risk is risk


@pytest.mark.parametrize(
    ("analyzer", "says", "risk"),
    [
        ("none", HIGH, UNKNOWN),
        ("llm", MEDIUM, MEDIUM),
        ("llm", UNKNOWN, UNKNOWN),
        ("shell", HIGH, LOW),
        ("ensemble", HIGH, HIGH),
        ("ensemble", UNKNOWN, LOW),
        ("ensemble", LOW, LOW),
    ],
)
def test_who_is_heard(analyzer: Any, says: ActionSecurityRisk, risk: ActionSecurityRisk) -> None:
    policy = ConfirmationPolicy(mode="risky", analyzer=analyzer)
    assert find_risk(CmdRunAction(command="ls", security_risk=says), policy, HERE).risk is risk


def test_the_model_cannot_talk_a_risk_down() -> None:
    policy = ConfirmationPolicy(mode="risky")
    assert find_risk(CmdRunAction(command="rm -rf /", security_risk=LOW), policy, HERE).risk is HIGH


@pytest.mark.parametrize(
    ("fields", "asked_for"),
    [
        ({"mode": "never"}, []),
        ({"mode": "always"}, ["UNKNOWN", "LOW", "MEDIUM", "UNCLEAR", "HIGH"]),
        ({"mode": "risky"}, ["UNKNOWN", "UNCLEAR", "HIGH"]),
        ({"mode": "risky", "confirm_unknown": False}, ["HIGH"]),
        ({"mode": "risky", "threshold": "MEDIUM"}, ["UNKNOWN", "MEDIUM", "UNCLEAR", "HIGH"]),
        ({"mode": "risky", "threshold": "LOW", "confirm_unknown": False}, ["LOW", "MEDIUM", "UNCLEAR", "HIGH"]),
    ],
)
def test_for_what_a_person_is_asked(fields: dict[str, Any], asked_for: list[str]) -> None:
    policy = ConfirmationPolicy(**fields)
    asked = [rating.name for rating in Rating if needs_confirmation(CmdRunAction(command="ls"), rating, policy)]
    assert asked == asked_for


@pytest.mark.parametrize(
    "command",
    [
        "frobnicate --x",
        "./run.sh",
        "python script.py",
        "python -m frobnicate",
        "bash build.sh",
        "bash --rcfile f -c ls",
        "git frobnicate",
        "ls --frobnicate-unlisted | tree --frobnicate",
        "cat $FILE",
        "cat /usr/share/*",
        "ls | xargs cat",
        "cd ..",
        "valgrind ls",
        "uv run frobnicate",
        "ffmpeg -i a b",
        "fd -x rm",
        "fakeroot ls",
        "/lib64/ld-linux-x86-64.so.2 /bin/ls",
    ],
)
def test_what_is_not_understood_is_medium_and_asked(command: str) -> None:
    risky, quiet = ConfirmationPolicy(mode="risky"), ConfirmationPolicy(mode="risky", confirm_unknown=False)
    for policy, status in (
        (risky, ConfirmationStatus.AWAITING_CONFIRMATION),
        (quiet, ConfirmationStatus.CONFIRMED if find(command) is MEDIUM else ConfirmationStatus.AWAITING_CONFIRMATION),
    ):
        [action] = assess([CmdRunAction(command=command)], policy, HERE)
        assert isinstance(action, CmdRunAction)
        assert (action.security_risk >= MEDIUM, action.confirmation_state) == (True, status)


def find(command: str) -> ActionSecurityRisk:
    return find_risk(CmdRunAction(command=command), ConfirmationPolicy(mode="risky"), HERE).risk


@pytest.mark.parametrize(
    "command",
    [
        "pytest -q",
        "make test",
        "npm test",
        "npm run build",
        "uv run pytest -q",
        "python -m pytest",
        "git commit -m x",
        "black .",
        "ruff check --fix src",
        "cat /etc/os-release",
        "rm -rf build",
        "pip install x",
        "curl https://a.org",
    ],
)
def test_what_is_understood_as_medium_is_not_asked(command: str) -> None:
    [action] = assess([CmdRunAction(command=command)], ConfirmationPolicy(mode="risky"), HERE)
    assert isinstance(action, CmdRunAction)
    assert (action.security_risk, action.confirmation_state) == (MEDIUM, ConfirmationStatus.CONFIRMED)


def test_the_risk_is_written_into_the_action() -> None:
    policy = ConfirmationPolicy(mode="risky")
    thought = AgentThinkAction(thought="hm")
    kept, first, second = assess((thought, CmdRunAction(command="ls"), CmdRunAction(command="sudo ls")), policy, HERE)
    assert kept is thought
    assert isinstance(first, CmdRunAction)
    assert (first.security_risk, first.confirmation_state) == (LOW, ConfirmationStatus.CONFIRMED)
    assert isinstance(second, CmdRunAction)
    assert (second.security_risk, second.confirmation_state) == (HIGH, ConfirmationStatus.AWAITING_CONFIRMATION)


def test_without_a_policy_the_models_own_estimate_stands() -> None:
    action = CmdRunAction(command="sudo ls", security_risk=LOW)
    assert assess([action], ConfirmationPolicy(), HERE) == (action,)
