"""The core: limits of a conversation, and model calls that fail."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import Limits, ModelCallFailed
from broker.contract.observations import AgentStateChangedObservation
from broker.log.status import fold_status
from controller_worker.core.concerns.limits import ConversationUsage, find_reached_limit
from controller_worker.core.effects import CallModel, Park, Rest
from controller_worker.core.state import State
from tests.controller_parts import START, finish, started, think

# Limits


def test_the_last_iteration_is_made_and_the_next_refused() -> None:
    core = started(limits=Limits(max_iterations=2))
    core.reply(think())
    assert core.reply(think()) == Rest()
    assert core.states() == ["running", "error"]
    assert core.state.usage.iteration == 2
    text = "RuntimeError: Agent reached maximum iteration. Current iteration: 2, max iteration: 2"
    assert core.state.lifecycle.last_error == text
    change = core.events[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert change.reason == text


def test_a_headless_conversation_is_refused_again_after_a_message() -> None:
    core = started(limits=Limits(max_iterations=1))
    core.reply(think())
    core.say()
    assert core.run() == Rest()
    assert core.states() == ["running", "error", "running", "error"]
    assert (core.state.usage.max_iterations, core.state.usage.iteration) == (1, 1)


def test_an_interactive_conversation_gets_as_many_iterations_again() -> None:
    core = started(limits=Limits(max_iterations=2), headless=False)
    core.reply(think())
    core.reply(think())
    core.say()
    assert core.run() == CallModel(3, 1)
    assert core.state.usage.max_iterations == 4


def test_a_resume_extends_as_a_message_does() -> None:
    core = started(limits=Limits(max_iterations=1), headless=False)
    core.reply(think())
    core.ask("running")
    assert core.run() == CallModel(2, 1)


def test_the_budget_refuses_before_the_call_and_consumes_no_iteration() -> None:
    core = started(limits=Limits(max_budget_usd=0.5))
    assert core.reply(think()) == CallModel(2, 1)
    assert core.reply(think()) == Rest()
    assert core.state.usage.iteration == 2
    assert core.state.lifecycle.last_error == (
        "RuntimeError: Agent reached maximum budget for conversation. Current budget: 0.50, max budget: 0.50"
    )


@pytest.mark.parametrize("headless", [True, False])
def test_budget_is_extended_by_its_amount_from_spending(headless: bool) -> None:
    core = started(limits=Limits(max_budget_usd=0.5), headless=headless)
    core.reply(think(), cost_usd=0.75)
    core.say()
    assert core.run() == CallModel(2, 1)
    assert core.state.usage.max_budget_usd == 1.25


def test_a_limit_that_was_not_hit_is_not_extended() -> None:
    core = started(limits=Limits(max_iterations=10, max_budget_usd=5.0), headless=False)
    core.fail("authentication", retry_in=None)
    core.say()
    core.run()
    assert (core.state.usage.max_iterations, core.state.usage.max_budget_usd) == (10, 5.0)


def test_unknown_price_is_reported_as_unknown_not_zero() -> None:
    core = started()
    core.reply(think(), cost_usd=None)
    core.reply(think())
    assert (core.state.usage.cost_usd, core.state.usage.has_unknown_cost) == (0.25, True)
    assert (core.state.usage.prompt_tokens, core.state.usage.completion_tokens) == (200, 20)


def test_limit_reached_says_nothing_below_the_limits() -> None:
    assert (
        find_reached_limit(
            State(usage=ConversationUsage(iteration=1, max_iterations=2, cost_usd=0.1, max_budget_usd=0.2))
        )
        is None
    )


# Failed model calls


def test_a_failed_call_is_tried_again_at_its_time() -> None:
    core = started()
    until = START + timedelta(seconds=8)
    assert core.fail("internal", retry_in=8) == Park(until, "internal")
    assert core.states() == ["running"]
    core.pass_time(7.9)
    assert core.run() == Park(until, "internal")
    core.pass_time(0.1)
    assert core.run() == CallModel(1, 2)
    assert core.fail("internal", retry_in=16) == Park(START + timedelta(seconds=24), "internal")
    core.pass_time(16)
    assert core.run() == CallModel(1, 3)


def test_a_reply_after_failures_begins_the_next_step_anew() -> None:
    core = started()
    core.fail("internal", retry_in=8)
    core.pass_time(8)
    assert core.reply(think()) == CallModel(2, 1)
    assert (core.state.usage.iteration, core.state.lifecycle.last_error) == (1, "")


def test_a_rate_limit_shows_and_passes() -> None:
    core = started()
    until = START + timedelta(seconds=8)
    assert core.fail("rate_limit", retry_in=8) == Park(until, "rate_limit")
    assert core.states() == ["running", "rate_limited"]
    core.pass_time(8)
    assert core.run() == CallModel(1, 2)
    assert core.states() == ["running", "rate_limited", "running"]


def test_rate_limit_over_at_once_is_not_shown() -> None:
    core = started()
    assert core.fail("rate_limit", retry_in=0) == CallModel(1, 2)
    assert core.states() == ["running"]


def test_rate_limit_after_a_pause_shows_only_if_valid() -> None:
    core = started()
    core.ask("paused")
    core.run()
    failure = ModelCallFailed(code="rate_limit", attempt=1, retry_at=START + timedelta(seconds=8))
    assert core.append(failure) == Rest()
    assert core.states() == ["running", "paused"]
    core.ask("running")
    assert core.run() == CallModel(1, 1)


@pytest.mark.parametrize("go_on", ["message", "resume"])
def test_a_person_ends_the_wait(go_on: str) -> None:
    core = started()
    core.fail("rate_limit", retry_in=600)
    core.say() if go_on == "message" else core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert core.states() == ["running", "rate_limited", "running"]


def test_failures_before_an_error_are_not_awaited_after_it() -> None:
    core = started()
    core.fail("authentication", retry_in=None)
    core.put(ModelCallFailed(code="timeout", attempt=2, retry_at=core.now + timedelta(seconds=60)))
    core.put(AgentStateChangedObservation(agent_state=AgentState.RUNNING))
    assert core.run() == CallModel(1, 1)


def test_a_resume_ends_a_wait_that_does_not_show() -> None:
    core = started()
    core.fail("internal", retry_in=600)
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert core.states() == ["running"]


def test_a_pause_and_a_stop_reach_a_rate_limited_conversation() -> None:
    for state in ("paused", "stopped"):
        core = started()
        core.fail("rate_limit", retry_in=8)
        core.ask(state)
        assert core.run() == Rest()
        core.pass_time(100)
        assert core.run() == Rest()
        assert core.states() == ["running", "rate_limited", state]


def test_the_last_failure_is_an_error() -> None:
    core = started()
    assert core.fail("authentication", retry_in=None, last_error="STATUS$ERROR_LLM_AUTHENTICATION") == Rest()
    assert core.states() == ["running", "error"]
    assert core.state.lifecycle.last_error == "STATUS$ERROR_LLM_AUTHENTICATION"
    core.say()
    assert core.run() == CallModel(1, 1)
    assert (core.state.usage.iteration, core.state.lifecycle.last_error, core.state.calls.attempt) == (0, "", 0)


def test_the_last_failure_during_a_pause_is_an_error_too() -> None:
    core = started()
    core.ask("paused")
    core.run()
    assert core.append(ModelCallFailed(code="authentication", last_error="no")) == Rest()
    assert core.states() == ["running", "paused", "error"]


def test_what_a_person_asked_for_is_announced_before_the_error() -> None:
    core = started()
    core.ask("paused")
    core.append(ModelCallFailed(code="authentication", last_error="no"))
    assert core.states() == ["running", "paused", "error"]
    assert fold_status(core.events).is_settled


def test_a_message_before_the_error_is_recalled_before_it() -> None:
    core = started()
    core.say()
    assert core.append(ModelCallFailed(code="authentication", last_error="no")) == Rest()
    assert core.trace(after=6) == [
        "7 Message(user)",
        "8 ModelCallFailed(environment)",
        "9 Recall(user) knowledge",
        "10 NullObs(environment, cause 9)",
        "11 SC error",
    ]


def test_a_resume_and_a_finish_at_once_leave_nothing_unanswered() -> None:
    core = started()
    core.ask("paused")
    core.run()
    core.ask("running")
    core.reply(finish(), seen_id=6)
    assert core.states() == ["running", "paused", "running", "finished"]
    assert fold_status(core.events).is_settled
