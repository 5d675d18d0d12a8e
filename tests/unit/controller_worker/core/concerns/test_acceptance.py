"""A checked finish: accepted, refused, refused too often; and user requests meanwhile."""

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import AgentSpec, EventSource
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    FinishRefusedObservation,
    OutcomeUnknownObservation,
)
from broker.contract.specs import GoalSpec
from controller_worker.core.effects import CallModel
from tests.controller_parts import Core, finish, started
from tests.scenarios import play, scenarios


def core_with(max_refusals: int = 2) -> Core:
    return started(agent=AgentSpec(goal=GoalSpec(check="make test", max_refusals=max_refusals)))


def check_ends(core: Core, exit_code: int) -> None:
    """Let the check that runs end with this exit code."""
    action = core.event(core.state.tools.pending[0].id, CmdRunAction)
    metadata = CmdOutputMetadata(exit_code=exit_code)
    core.observe(
        action.id, CmdOutputObservation(content="1 failed", command=action.command, metadata=metadata, cause=action.id)
    )


def play_checked(core: Core, scenario: str) -> Core:
    return play(core, scenario, succeeds=lambda core: check_ends(core, 0), fails=lambda core: check_ends(core, 1))


def test_check_is_an_environment_command_in_its_own_shell() -> None:
    core = play(core_with(), "finish, dispatched 9, states running")
    action = core.event(-1, CmdRunAction)
    assert (action.command, action.source) == ("make test", EventSource.ENVIRONMENT)
    assert (action.is_static, action.blocking, action.timeout) == (True, True, 600.0)


@scenarios(
    {
        "exit code 0 accepts the finish": "finish, succeeds -> rest, states running finished, iteration 1",
        "a check that succeeds after refusals counts": (
            "finish, fails, bash, ran, finish, fails, finish, succeeds -> rest, states running finished"
        ),
        "calls beside the finish come before its check": (
            "bash+finish -> tools 8, ran 8 -> tools 11, succeeds -> rest, states running finished"
        ),
        "nothing is checked during a pause": (
            "paused & finish, states running paused, dispatched , running -> tools 13, succeeds -> rest"
        ),
        "a message during the check takes the finish back": "finish, say, succeeds -> model 2, states running",
        "a stop ends the check": "finish, stopped -> rest, states running stopped, pending ",
    }
)
def test_checked_finish(scenario: str) -> None:
    play_checked(core_with(), scenario)


def test_anything_else_refuses_it_and_the_model_is_told() -> None:
    refused = play_checked(core_with(), "finish, fails -> model 2, states running").event(-1, FinishRefusedObservation)
    assert refused.content.startswith(
        "Your finish was not accepted (1 of 2 times): the check `make test` must exit with code 0 and did not;"
    )


@pytest.mark.parametrize("says_more", [False, True])
def test_one_refusal_too_many_is_an_error_without_a_message(says_more: bool) -> None:
    more = "say -> model 2, finish, fails -> model 3, " if says_more else ""
    core = play_checked(core_with(max_refusals=1), f"finish, fails, {more}finish, fails -> rest, code goal_not_reached")
    last = core.event(-1, AgentStateChangedObservation)
    assert last.reason == "GoalNotReachedError: The check of the goal failed each time the agent finished"


def test_an_unknown_outcome_accepts_nothing() -> None:
    core = core_with()
    core.reply(finish())
    action_id = core.state.version
    unknown = OutcomeUnknownObservation(content="The process ended.", cause=action_id)
    assert core.observe(action_id, unknown) == CallModel(2, 1)
