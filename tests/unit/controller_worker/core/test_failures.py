"""The table of failures: every class of both backends, and where each of them ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.observations import AgentStateChangedObservation
from broker.runtime.errors import StoreUnavailable
from broker.specs.agent_state import is_settled
from controller_worker.core.effects import CallModel, Park, Rest
from controller_worker.core.failures import FAILURES, Failure, code_of, failure_of
from controller_worker.llm.errors import MODEL_ERRORS, LLMConfigError
from tests.controller_parts import started

RETRIED = ["internal", "malformed_reply", "no_response", "rate_limit", "service_unavailable", "timeout"]


def test_every_class_of_the_backends_has_its_line() -> None:
    assert set(FAILURES) == {*MODEL_ERRORS, LLMConfigError.code, "hook_veto", "max_budget", "unexpected"}


def test_what_is_tried_again_is_what_its_class_says() -> None:
    assert sorted(code for code, error in MODEL_ERRORS.items() if error.retryable) == RETRIED
    assert sorted(code for code, failure in FAILURES.items() if failure.is_retried) == RETRIED


def test_every_failure_ends_in_an_error_and_only_a_rate_limit_shows_while_it_is_waited_for() -> None:
    assert {failure.ended.value for failure in FAILURES.values()} == {"error"}
    assert [code for code, failure in FAILURES.items() if failure.waiting.value != "running"] == ["rate_limit"]


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("code", sorted(set(FAILURES) - {"context_window"}))  # a prompt that is too long is condensed
def test_a_failure_ends_in_an_error_that_says_its_code(code: str, headless: bool) -> None:
    core = started(headless=headless)
    text = f"Some: {code}"
    if FAILURES[code].is_retried:
        for attempt in range(1, 5):
            assert core.wants() == CallModel(1, attempt)
            assert isinstance(core.fail(code, retry_in=8), Park)
            core.pass_time(8)
            core.run()
    assert core.fail(code, retry_in=None, last_error=text) == Rest()
    change = core.events[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert (change.agent_state.value, change.reason, change.code) == ("error", text, code)
    assert is_settled(core.state.lifecycle.agent_state)
    assert (core.state.lifecycle.error_code, core.state.lifecycle.last_error) == (code, text)


def test_a_code_of_another_version_is_tried_again() -> None:
    assert failure_of("solar_storm") == Failure(is_retried=True)
    core = started()
    assert core.fail("solar_storm", retry_in=8) == Park(core.now + timedelta(seconds=8), "solar_storm")


def test_going_on_forgets_the_error() -> None:
    core = started()
    core.fail("authentication", retry_in=None)
    core.say()
    core.run()
    assert (core.state.lifecycle.error_code, core.state.lifecycle.last_error) == ("", "")


def test_an_error_that_nobody_foresaw_has_a_code_too() -> None:
    assert code_of(KeyError("x")) == "unexpected"
    assert code_of(StoreUnavailable("gone")) == "store_unavailable"
