"""Failed model calls in the core: visible state, the outcome of each class of failure, and oversized prompts."""

from datetime import timedelta

import pytest

from broker.contract.actions import CondensationAction, CondensationRequestAction
from broker.contract.agent_state import is_settled
from broker.contract.condenser_specs import LLMSummarizingCondenserSpec, NoOpCondenserSpec
from broker.contract.events import AgentSpec, ModelCallFailed, ModelReply, TokenUsage
from broker.contract.observations import AgentStateChangedObservation
from broker.log.status import fold_status
from broker.runtime.errors import StoreUnavailable
from controller_worker.core.concerns.model_calls import MAX_OVERFLOWS, RATE_LIMIT, find_error_code, find_waiting_state
from controller_worker.core.effects import CallModel, Park, Rest
from controller_worker.providers.errors import MODEL_ERRORS, LLMConfigError
from tests.controller_parts import START, Core, finish, started
from tests.scenarios import play, scenarios

RETRIED = ["internal", "malformed_reply", "no_response", "rate_limit", "service_unavailable", "timeout"]
CODES = [*MODEL_ERRORS, LLMConfigError.code, "hook_veto", "max_budget", "unexpected"]
TOO_LONG = "LLMContextWindowExceedError: prompt is too long"
REFUSED = ModelCallFailed(code="authentication", last_error="no")


@scenarios(
    {
        "a failed call is tried again at its time": (
            "fail internal in 8 -> park internal 8, states running, wait 7.9 -> park internal 8, wait 0.1 -> model 1 try 2, "
            "fail internal in 16 -> park internal 24, wait 16 -> model 1 try 3"
        ),
        "a code of another version is tried again": "fail solar_storm in 8 -> park solar_storm 8",
        "a reply after failures starts the next step from the beginning": "fail internal in 8, wait 8, think -> model 2, iteration 1, code ",
        "a rate limit shows and passes": (
            "fail rate_limit in 8 -> park rate_limit 8, states running rate_limited, wait 8 -> model 1 try 2, "
            "states running rate_limited running"
        ),
        "a rate limit over at once is not shown": "fail rate_limit in 0 -> model 1 try 2, states running",
        "a message ends the wait": "fail rate_limit in 600, say -> model 1, states running rate_limited running",
        "a resume ends the wait": "fail rate_limit in 600, running -> model 1, states running rate_limited running",
        "a resume ends a wait that does not show": "fail internal in 600, running -> model 1, states running",
        "a pause reaches a rate limited conversation": (
            "fail rate_limit in 8, paused -> rest, wait 100 -> rest, states running rate_limited paused"
        ),
        "a stop reaches a rate limited conversation": (
            "fail rate_limit in 8, stopped -> rest, wait 100 -> rest, states running rate_limited stopped"
        ),
        "going on after the last failure forgets it": (
            "fail authentication -> rest, states running error, say -> model 1, iteration 0, code "
        ),
    }
)
def test_failed_call(scenario: str) -> None:
    play(started(), scenario)


def test_rate_limit_after_a_pause_shows_only_if_valid() -> None:
    core = play(started(), "paused")
    failure = ModelCallFailed(code="rate_limit", attempt=1, retry_at=START + timedelta(seconds=8))
    assert core.append(failure) == Rest()
    play(core, "states running paused, running -> model 1")


def test_failures_before_an_error_are_not_awaited_after_it() -> None:
    core = play(started(), "fail authentication")
    core.put(ModelCallFailed(code="timeout", attempt=2, retry_at=core.now + timedelta(seconds=60)))
    core.put(AgentStateChangedObservation(agent_state="running"))
    assert core.run() == CallModel(1, 1)


@pytest.mark.parametrize("before", [["paused -> rest"], []], ids=["announced pause", "pause at the same time"])
def test_the_last_failure_during_a_pause_is_an_error_too(before: list[str]) -> None:
    core = started()
    core.ask("paused")
    for scenario in before:
        play(core, scenario)
    assert core.append(REFUSED) == Rest()
    assert core.states() == ["running", "paused", "error"]
    assert fold_status(core.events).is_settled


def test_a_resume_and_a_finish_at_once_leave_nothing_unanswered() -> None:
    core = play(started(), "paused")
    core.ask("running")
    core.reply(finish(), seen_id=6)
    assert core.states() == ["running", "paused", "running", "finished"]
    assert fold_status(core.events).is_settled


# Classes of failures


def test_classes_say_what_is_retried_and_what_shows() -> None:
    assert sorted(code for code, error in MODEL_ERRORS.items() if error.retryable) == RETRIED
    assert [code for code in CODES if find_waiting_state(code).value != "running"] == [RATE_LIMIT]
    assert find_error_code(KeyError("x")) == "unexpected"
    assert find_error_code(StoreUnavailable("gone")) == "store_unavailable"


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("code", sorted(set(CODES) - {"context_window"}))  # a prompt that is too long is condensed
def test_a_failure_ends_in_an_error_that_says_its_code(code: str, headless: bool) -> None:
    core = started(headless=headless)
    text = f"Some: {code}"
    if code in RETRIED:
        for attempt in range(1, 5):
            assert core.wants() == CallModel(1, attempt)
            assert isinstance(core.fail(code, retry_in=8), Park)
            core.pass_time(8)
            core.run()
    assert core.fail(code, retry_in=None, last_error=text) == Rest()
    change = core.event(-1, AgentStateChangedObservation)
    assert (change.agent_state.value, change.reason, change.code) == ("error", text, code)
    assert is_settled(core.state.lifecycle.agent_state)
    assert (core.state.lifecycle.error_code, core.state.lifecycle.last_error) == (code, text)


# A prompt that does not fit the model is condensed


def overflow(core: Core) -> object:
    return core.fail("context_window", retry_in=None, last_error=TOO_LONG)


def test_overflow_leads_to_a_request_and_next_step() -> None:
    """Golden traces 20 and 21: neither takes an iteration."""
    core = started()
    assert overflow(core) == CallModel(1, 1)
    assert core.append(CondensationAction(forgotten_event_ids=(4,))) == CallModel(1, 1)
    assert core.trace(after=6) == [
        "7 ModelCallFailed(environment)",
        "8 CondensationRequestAction(agent)",
        "9 CondensationAction(agent)",
    ]
    assert core.states() == ["running"]


@pytest.mark.parametrize(
    "replies", [[], [ModelReply(service="condenser", content="notes")]], ids=["plain", "condenser's reply"]
)
def test_repeated_overflows_end_in_an_error(replies: list[ModelReply]) -> None:
    core = started(agent=AgentSpec(condenser=LLMSummarizingCondenserSpec()))
    for _ in range(MAX_OVERFLOWS):
        assert overflow(core) == CallModel(1, 1)
        core.append(*replies, CondensationAction(forgotten_event_ids=()))
    assert core.state.calls.reply_id == 0
    assert isinstance(overflow(core), Rest)
    assert core.states() == ["running", "error"]
    assert core.state.lifecycle.last_error == TOO_LONG


def test_a_reply_or_a_person_begins_the_count_anew() -> None:
    core = started()
    for _ in range(2):
        overflow(core)
    assert core.state.calls.overflows == 2
    core.reply(text="It fits.")
    assert core.state.calls.overflows == 0
    play(core, "say")
    overflow(core)
    core.say()
    assert core.state.calls.overflows == 0


@pytest.mark.parametrize(
    "agent",
    [AgentSpec(condenser=NoOpCondenserSpec()), AgentSpec(enable_history_truncation=False)],
    ids=["no condenser answers requests", "switched off"],
)
def test_overflow_with_nothing_to_condense_is_an_error(agent: AgentSpec) -> None:
    core = started(agent=agent)
    overflow(core)
    assert core.states() == ["running", "error"]
    assert not any(isinstance(event, CondensationRequestAction) for event in core.events)


def test_condenser_costs_are_counted_without_a_step() -> None:
    core = started(agent=AgentSpec(condenser=LLMSummarizingCondenserSpec()))
    usage = TokenUsage(prompt_tokens=7, completion_tokens=3)
    reply = ModelReply(service="condenser", content="notes", cost_usd=0.5, usage=usage)
    wanted = core.append(reply, CondensationAction(forgotten_event_ids=(4,), summary="notes", summary_offset=1))
    assert wanted == CallModel(1, 1)
    counted = core.state.usage
    assert (counted.cost_usd, counted.prompt_tokens, counted.completion_tokens, counted.iteration) == (0.5, 7, 3, 0)
