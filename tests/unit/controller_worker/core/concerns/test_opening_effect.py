"""Opening a workspace that begins with something: before everything else, and what follows when it cannot be opened."""

from __future__ import annotations

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.double_texting import RolledBackObservation
from broker.contract.events import Observation, WorkspaceSpec
from broker.contract.observations import ErrorObservation, OutcomeUnknownObservation
from broker.contract.workspace_events import OpenWorkspaceAction, WorkspaceFailedObservation, WorkspaceOpenedObservation
from broker.contract.workspace_sources import GitSource
from controller_worker.core.commit import to_index_fields
from controller_worker.core.concerns.opening import FAILED_CODE, MAX_ATTEMPTS
from controller_worker.core.effects import AwaitTools, CallModel, Rest
from controller_worker.loop.replay import replay
from tests.controller_parts import Core

SPEC = WorkspaceSpec(source=GitSource(url="https://example.org/project.git", ref="main"))
OPENED = WorkspaceOpenedObservation(content="It holds the project.", commit="0" * 40, files=3, size_bytes=9, cause=4)


def begun(*, surveys: bool = False) -> Core:
    """A conversation whose workspace is being opened."""
    core = Core(surveys=surveys, workspace=SPEC)
    assert core.run() == AwaitTools((4,))
    return core


def answered(core: Core, answer: Observation) -> object:
    asked = max(event.id for event in core.events if isinstance(event, OpenWorkspaceAction))
    return core.observe(asked, answer.model_copy(update={"cause": asked}))


def test_nothing_happens_before_it_is_open() -> None:
    core = begun()
    assert core.states() == []
    assert core.dispatched == [4]
    assert answered(core, OPENED) == CallModel(1, 1)
    assert core.states() == ["running"]


def test_opened_workspace_is_asked_for_its_instructions() -> None:
    core = begun(surveys=True)
    assert answered(core, OPENED) == AwaitTools((6,))
    assert core.event(6).kind == "action.survey"


def test_failed_opening_is_an_error_retried_on_a_message() -> None:
    core = begun()
    failed = WorkspaceFailedObservation(content="There is no such repository.", code="source_unusable")
    assert answered(core, failed) == Rest()
    assert core.states() == ["running", "error"]
    assert (core.state.lifecycle.last_error, core.state.lifecycle.error_code) == (
        "There is no such repository.",
        "source_unusable",
    )
    core.say("It is there now.")
    asked = core.state.version + 1
    assert core.run() == AwaitTools((asked,))
    assert answered(core, OPENED) == CallModel(1, 1)
    assert not replay(core.events).divergence


def test_a_resume_tries_again_too() -> None:
    core = begun()
    answered(core, ErrorObservation(content="The worker broke."))
    assert (core.state.lifecycle.last_error, core.state.lifecycle.error_code) == ("The worker broke.", FAILED_CODE)
    core.ask("running")
    assert isinstance(core.run(), AwaitTools)
    assert answered(core, OPENED) == CallModel(1, 1)


def test_an_unknown_outcome_is_begun_again_but_not_for_ever() -> None:
    core = begun()
    for _ in range(MAX_ATTEMPTS - 1):
        assert isinstance(answered(core, OutcomeUnknownObservation(content="?")), AwaitTools)
    assert answered(core, OutcomeUnknownObservation(content="?")) == Rest()
    assert core.states()[-1] == "error"


@pytest.mark.parametrize("wanted", ["stopped", "paused"])
def test_nobody_waits_for_it_when_work_is_to_stop(wanted: str) -> None:
    core = begun()
    core.ask(wanted)
    assert core.run() == Rest()
    assert core.states()[-1] == wanted
    assert core.state.lifecycle.last_error == ""
    core.ask("running")
    if wanted == "paused":
        assert core.run() == AwaitTools((4,))
        assert core.state.lifecycle.agent_state is AgentState.PAUSED
    else:
        assert isinstance(core.run(), AwaitTools)
        assert core.commits[-1].events[-1].kind == "action.open_workspace"
    assert answered(core, OPENED) == CallModel(1, 1)


def test_a_rollback_leaves_the_opening_at_work() -> None:
    core = Core(double_texting="rollback", workspace=SPEC)
    assert core.run() == AwaitTools((4,))
    core.say("something else")
    assert core.run() == AwaitTools((4,))
    assert any(isinstance(event, RolledBackObservation) for event in core.events)
    assert to_index_fields(core.state)["wait_reason"] == "tool"
    assert answered(core, OPENED) == CallModel(1, 1)


def test_a_workspace_without_a_source_is_not_opened() -> None:
    core = Core()
    assert core.run() == CallModel(1, 1)
    assert not any(isinstance(event, OpenWorkspaceAction) for event in core.events)
