"""The core: the limits of a conversation."""

from datetime import timedelta

import pytest

from broker.contract.events import Limits, TokenUsage
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation
from tests.controller_parts import START, Core, started, think
from tests.scenarios import play, scenarios

OUT_OF_TIME = "RuntimeError: Agent reached maximum time for conversation. Max seconds: 60"
PEOPLE = {"headless": False}


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (
            {"max_iterations": 2},
            "RuntimeError: Agent reached maximum iteration. Current iteration: 2, max iteration: 2",
        ),
        (
            {"max_budget_usd": 0.5},
            "RuntimeError: Agent reached maximum budget for conversation. Current budget: 0.50, max budget: 0.50",
        ),
        (
            {"max_tokens": 220},
            "RuntimeError: Agent reached maximum number of tokens for conversation. Current tokens: 220, max tokens: 220",
        ),
    ],
    ids=["iterations", "budget", "tokens in and out"],
)
def test_limit_refuses_the_next_call_and_names_itself(limits: dict[str, float], error: str) -> None:
    core = play(started(limits=Limits(**limits)), "think -> model 2, think(more) -> rest, states running error")
    (name,) = limits
    assert (core.state.lifecycle.last_error, core.state.lifecycle.error_code) == (error, name.removesuffix("_usd"))
    assert core.state.usage.iteration == 2
    change = core.event(-1, AgentStateChangedObservation)
    assert change.reason == error


@scenarios(
    {
        "headless, iterations are refused again after a message": (
            {},
            {"max_iterations": 1},
            "think, say -> rest, states running error running error, iteration 1",
            {"max_iterations": 1},
        ),
        "interactive, a message gives as many iterations again": (
            PEOPLE,
            {"max_iterations": 2},
            "think, think, say -> model 3",
            {"max_iterations": 4},
        ),
        "a resume extends as a message does": (
            PEOPLE,
            {"max_iterations": 1},
            "think, running -> model 2",
            {"max_iterations": 2},
        ),
        "two limits at once are both extended": (
            PEOPLE,
            {"max_iterations": 1, "max_tokens": 100},
            "think, say -> model 2",
            {"max_iterations": 2, "max_tokens": 210},
        ),
        "a limit that was not hit is not extended": (
            PEOPLE,
            {"max_iterations": 10, "max_budget_usd": 5.0},
            "fail authentication, say",
            {"max_iterations": 10, "max_budget_usd": 5.0},
        ),
    }
)
def test_limit_is_extended(scenario: tuple[dict[str, bool], dict[str, float], str, dict[str, float]]) -> None:
    options, limits, script, expected = scenario
    usage = play(started(limits=Limits(**limits), **options), script).state.usage
    assert {name: getattr(usage, name) for name in expected} == expected


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize(
    ("limits", "reply", "expected"),
    [
        ({"max_budget_usd": 0.5}, {"cost_usd": 0.75}, 1.25),
        ({"max_tokens": 100}, {"usage": TokenUsage(prompt_tokens=150, completion_tokens=5)}, 255),
    ],
    ids=["budget", "tokens"],
)
def test_limit_is_extended_by_its_amount_from_spending(
    limits: dict[str, float], reply: dict[str, object], expected: float, headless: bool
) -> None:
    core = started(limits=Limits(**limits), headless=headless)
    core.reply(think(), **reply)
    play(core, "say -> model 2")
    assert [getattr(core.state.usage, name) for name in limits] == [expected]


def test_unknown_price_is_reported_as_unknown_not_zero() -> None:
    core = started()
    core.reply(think(), cost_usd=None)
    core.reply(think())
    assert (core.state.usage.cost_usd, core.state.usage.has_unknown_cost) == (0.25, True)
    assert (core.state.usage.prompt_tokens, core.state.usage.completion_tokens) == (200, 20)


# Time


def timed() -> Core:
    core = started(limits=Limits(max_seconds=60))
    assert core.state.usage.deadline == START + timedelta(seconds=60)
    return core


@scenarios(
    {
        "a wait for a retry ends with the time": (
            "fail rate_limit in 8, wait 8, fail rate_limit in 600 -> park rate_limit 60, wait 52 -> rest, "
            "states running rate_limited running rate_limited error"
        ),
        "an agent that waits for a person has time": "text, wait 1000 -> rest, states running awaiting_user_input",
    }
)
def test_time_of_a_conversation(scenario: str) -> None:
    play(timed(), scenario)


@pytest.mark.parametrize(
    ("scenario", "seconds"),
    [("wait 60, say -> model 1", 120), ("fail rate_limit in 8, wait 8", 60)],
    ids=["starts again when a user continues", "is not given by a rate limit that passes"],
)
def test_deadline(scenario: str, seconds: int) -> None:
    assert play(timed(), scenario).state.usage.deadline == START + timedelta(seconds=seconds)


def test_work_ends_when_its_time_is_up() -> None:
    change = play(timed(), "wait 59.9 -> model 1, wait 0.1 -> rest").event(-1, AgentStateChangedObservation)
    assert (change.reason, change.code) == (OUT_OF_TIME, "max_time")


def test_action_in_flight_is_ended_with_the_time() -> None:
    core = play(timed(), "bash -> tools 8, wait 60 -> rest")
    answer = core.event(-2, ErrorObservation)
    assert (answer.cause, core.commits[-1].cancels) == (8, [8])
