"""A finish that is checked: accepted, refused, refused once too often; and what a person does meanwhile."""

from __future__ import annotations

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
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from tests.controller_parts import Core, bash, check_snapshots, finish, started


def core_with(max_refusals: int = 2) -> Core:
    return started(agent=AgentSpec(goal=GoalSpec(check="make test", max_refusals=max_refusals)))


def checked(core: Core, exit_code: int) -> Effect:
    """Finish, and let the check end with this exit code."""
    wanted = core.reply(finish())
    assert isinstance(wanted, AwaitTools)
    (action_id,) = wanted.action_ids
    return core.observe(action_id, result(core, action_id, exit_code))


def result(core: Core, action_id: int, exit_code: int) -> CmdOutputObservation:
    action = core.event(action_id)
    assert isinstance(action, CmdRunAction)
    metadata = CmdOutputMetadata(exit_code=exit_code)
    return CmdOutputObservation(content="1 failed", command=action.command, metadata=metadata, cause=action_id)


def test_check_is_an_environment_command_in_its_own_shell() -> None:
    core = core_with()
    core.reply(finish())
    action = core.events[-1]
    assert isinstance(action, CmdRunAction)
    assert (action.command, action.source, action.is_static, action.blocking, action.timeout) == (
        "make test",
        EventSource.ENVIRONMENT,
        True,
        True,
        600.0,
    )
    assert core.dispatched == [action.id]
    assert core.states() == ["running"]


def test_exit_code_0_accepts_the_finish() -> None:
    core = core_with()
    assert checked(core, 0) == Rest()
    assert core.states() == ["running", "finished"]
    assert core.state.usage.iteration == 1


def test_anything_else_refuses_it_and_the_model_is_told() -> None:
    core = core_with()
    assert checked(core, 1) == CallModel(2, 1)
    refused = core.events[-1]
    assert isinstance(refused, FinishRefusedObservation)
    assert refused.content.startswith(
        "Your finish was not accepted (1 of 2 times): the check `make test` must exit with code 0 and did not;"
    )
    assert core.states() == ["running"]


def test_a_check_that_succeeds_after_refusals_counts() -> None:
    core = core_with()
    checked(core, 1)
    core.reply(bash("fix"))
    core.observe(core.state.version)
    checked(core, 2)
    assert checked(core, 0) == Rest()
    assert core.states() == ["running", "finished"]


def test_one_refusal_too_many_is_an_error() -> None:
    core = core_with(max_refusals=1)
    checked(core, 1)
    assert checked(core, 1) == Rest()
    assert core.states() == ["running", "error"]
    last = core.events[-1]
    assert isinstance(last, AgentStateChangedObservation)
    assert last.reason == "GoalNotReachedError: The check of the goal failed each time the agent finished"
    assert core.state.lifecycle.error_code == "goal_not_reached"


def test_an_unknown_outcome_accepts_nothing() -> None:
    core = core_with()
    core.reply(finish())
    action_id = core.state.version
    unknown = OutcomeUnknownObservation(content="The process ended.", cause=action_id)
    assert core.observe(action_id, unknown) == CallModel(2, 1)


def test_calls_beside_the_finish_come_before_its_check() -> None:
    core = core_with()
    wanted = core.reply(bash(), finish())
    assert isinstance(wanted, AwaitTools)
    assert core.observe(wanted.action_ids[0]) == AwaitTools((core.state.version,))
    assert isinstance(core.events[-1], CmdRunAction)
    assert core.events[-1].source is EventSource.ENVIRONMENT


def test_nothing_is_checked_during_a_pause() -> None:
    core = core_with()
    core.ask("paused")
    core.reply(finish())
    assert core.states() == ["running", "paused"]
    assert core.dispatched == []
    core.ask("running")
    assert isinstance(core.run(), AwaitTools)


def test_a_message_during_the_check_takes_the_finish_back() -> None:
    core = core_with()
    core.reply(finish())
    action_id = core.state.version
    core.say("one more thing")
    core.run()
    assert core.observe(action_id, result(core, action_id, 0)) == CallModel(2, 1)
    assert core.states() == ["running"]


def test_a_message_begins_the_count_anew() -> None:
    core = core_with(max_refusals=1)
    checked(core, 1)
    core.say("try again")
    core.run()
    assert checked(core, 1) == CallModel(3, 1)


def test_a_stop_ends_the_check() -> None:
    core = core_with()
    core.reply(finish())
    core.ask("stopped")
    assert core.run() == Rest()
    assert core.states() == ["running", "stopped"]
    assert core.state.tools.pending == ()


def test_a_snapshot_at_any_point_goes_on_alike() -> None:
    core = core_with()
    checked(core, 1)
    checked(core, 0)
    check_snapshots(core)
