"""A workspace with a source is opened first; the effect of a failed opening."""

from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.double_texting import RolledBackObservation
from broker.contract.events import Observation, WorkspaceSpec
from broker.contract.observations import ErrorObservation, OutcomeUnknownObservation
from broker.contract.workspace_events import OpenWorkspaceAction, WorkspaceFailedObservation, WorkspaceOpenedObservation
from broker.contract.workspace_sources import GitSource
from controller_worker.core.commit import to_index_fields
from controller_worker.core.concerns.opening import FAILED_CODE, MAX_ATTEMPTS
from controller_worker.core.effects import AwaitTools, Rest
from tests.controller_parts import Core, check_replay
from tests.scenarios import play

SPEC = WorkspaceSpec(source=GitSource(url="https://example.org/project.git", ref="main"))
OPENED = WorkspaceOpenedObservation(content="It holds the project.", commit="0" * 40, files=3, size_bytes=9, cause=4)


FAILED = WorkspaceFailedObservation(content="There is no such repository.", code="source_unusable")


def begun(**options: Any) -> Core:
    """A conversation whose workspace is being opened."""
    core = Core(**{"workspace": SPEC} | options)
    assert core.run() == AwaitTools((4,))
    return core


def answered(core: Core, answer: Observation) -> object:
    asked = max(event.id for event in core.events if isinstance(event, OpenWorkspaceAction))
    return core.observe(asked, answer.model_copy(update={"cause": asked}))


def play_opened(core: Core, scenario: str) -> Core:
    steps = {
        "opened": lambda core: answered(core, OPENED),
        "failed": lambda core: answered(core, FAILED),
        "broken": lambda core: answered(core, ErrorObservation(content="The worker broke.")),
    }
    return play(core, scenario, **steps)


def test_nothing_happens_before_it_is_open() -> None:
    play_opened(begun(), "states , dispatched 4, opened -> model 1, states running")
    core = play_opened(begun(surveys=True), "opened -> tools 6")
    assert core.event(6).kind == "action.survey"
    core = play(Core(), "wait 0 -> model 1")
    assert not any(isinstance(event, OpenWorkspaceAction) for event in core.events)  # it has no source


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [("failed", "source_unusable", FAILED.content), ("broken", FAILED_CODE, "The worker broke.")],
)
@pytest.mark.parametrize("go_on", ["say", "running"])
def test_failed_opening_is_an_error_until_a_person_goes_on(answer: str, code: str, text: str, go_on: str) -> None:
    core = play_opened(begun(), f"{answer} -> rest, states running error, code {code}")
    assert core.state.lifecycle.last_error == text
    asked = core.state.version + 2
    play_opened(core, f"{go_on} -> tools {asked}, opened -> model 1")
    check_replay(core)


def test_an_unknown_outcome_is_begun_again_but_not_for_ever() -> None:
    core = begun()
    for _ in range(MAX_ATTEMPTS - 1):
        assert isinstance(answered(core, OutcomeUnknownObservation(content="?")), AwaitTools)
    assert answered(core, OutcomeUnknownObservation(content="?")) == Rest()
    assert core.states()[-1] == "error"


@pytest.mark.parametrize("wanted", ["stopped", "paused"])
def test_opening_is_not_awaited_when_work_is_to_stop(wanted: str) -> None:
    core = play(begun(), f"{wanted} -> rest")
    assert (core.states()[-1], core.state.lifecycle.last_error) == (wanted, "")
    core.ask("running")
    if wanted == "paused":
        assert core.run() == AwaitTools((4,))
        assert core.state.lifecycle.agent_state is AgentState.PAUSED
    else:
        assert isinstance(core.run(), AwaitTools)
        assert core.commits[-1].events[-1].kind == "action.open_workspace"
    play_opened(core, "opened -> model 1")


def test_a_rollback_leaves_the_opening_at_work() -> None:
    core = play(begun(double_texting="rollback"), "say(something else) -> tools 4")
    assert any(isinstance(event, RolledBackObservation) for event in core.events)
    assert to_index_fields(core.state)["wait_reason"] == "tool"
    play_opened(core, "opened -> model 1")
