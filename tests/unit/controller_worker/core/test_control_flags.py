"""Limits of tokens and of time; those of iterations and budget are in test_controller_limits.py."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.events import Limits, TokenUsage
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation
from controller_worker.core.concerns.limits import ConversationUsage, Refusal, find_reached_limit
from controller_worker.core.effects import AwaitTools, CallModel, Park, Rest
from controller_worker.core.state import State
from tests.controller_parts import START, Core, bash, started, think

OUT_OF_TIME = "RuntimeError: Agent reached maximum time for conversation. Max seconds: 60"


def test_tokens_in_and_out_count() -> None:
    core = started(limits=Limits(max_tokens=220))
    assert core.reply(think()) == CallModel(2, 1)
    assert core.reply(think("more")) == Rest()
    assert core.state.lifecycle.last_error == (
        "RuntimeError: Agent reached maximum number of tokens for conversation. Current tokens: 220, max tokens: 220"
    )
    assert (core.state.lifecycle.error_code, core.state.usage.iteration) == ("max_tokens", 2)


@pytest.mark.parametrize("headless", [True, False])
def test_tokens_are_extended_by_their_amount_from_what_was_used(headless: bool) -> None:
    core = started(limits=Limits(max_tokens=100), headless=headless)
    core.reply(think(), usage=TokenUsage(prompt_tokens=150, completion_tokens=5))
    core.say()
    assert core.run() == CallModel(2, 1)
    assert core.state.usage.max_tokens == 255


def test_two_limits_at_once_are_both_extended() -> None:
    core = started(limits=Limits(max_iterations=1, max_tokens=100), headless=False)
    core.reply(think())
    core.say()
    assert core.run() == CallModel(2, 1)
    assert (core.state.usage.max_iterations, core.state.usage.max_tokens) == (2, 210)


def test_the_code_says_which_limit() -> None:
    state = State(usage=ConversationUsage(iteration=3, max_iterations=3))
    assert find_reached_limit(state) == Refusal(
        "max_iterations", "RuntimeError: Agent reached maximum iteration. Current iteration: 3, max iteration: 3"
    )
    budget = find_reached_limit(State(usage=ConversationUsage(max_iterations=3, cost_usd=2.0, max_budget_usd=1.5)))
    assert budget is not None
    assert budget.code == "max_budget"


def timed() -> Core:
    core = started(limits=Limits(max_seconds=60))
    assert core.state.usage.deadline == START + timedelta(seconds=60)
    return core


def test_work_ends_when_its_time_is_up() -> None:
    core = timed()
    core.pass_time(59.9)
    assert core.run() == CallModel(1, 1)
    core.pass_time(0.1)
    assert core.run() == Rest()
    change = core.events[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert (change.reason, change.code) == (OUT_OF_TIME, "max_time")


def test_what_runs_then_is_ended() -> None:
    core = timed()
    assert core.reply(bash()) == AwaitTools((8,))
    core.pass_time(60)
    assert core.run() == Rest()
    answer = core.events[-2]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, core.commits[-1].cancels) == (8, [8])


def test_a_wait_for_a_retry_ends_with_the_time() -> None:
    core = timed()
    core.fail("rate_limit", retry_in=8)
    core.pass_time(8)
    core.run()
    assert core.fail("rate_limit", retry_in=600) == Park(START + timedelta(seconds=60), "rate_limit")
    core.pass_time(52)
    assert core.run() == Rest()
    assert core.states() == ["running", "rate_limited", "running", "rate_limited", "error"]


def test_the_time_begins_anew_when_a_person_goes_on() -> None:
    core = timed()
    core.pass_time(60)
    core.run()
    core.say()
    assert core.run() == CallModel(1, 1)
    assert core.state.usage.deadline == START + timedelta(seconds=120)


def test_a_rate_limit_that_passes_gives_no_more_time() -> None:
    core = timed()
    core.fail("rate_limit", retry_in=8)
    core.pass_time(8)
    core.run()
    assert core.state.usage.deadline == START + timedelta(seconds=60)


def test_nobody_is_hurried_who_waits_for_a_person() -> None:
    core = timed()
    core.reply(text="Which one?")
    core.pass_time(1_000)
    assert core.run() == Rest()
    assert core.states() == ["running", "awaiting_user_input"]
