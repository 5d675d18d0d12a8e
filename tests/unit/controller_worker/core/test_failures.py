"""Failed model calls: what is tried again, what shows meanwhile, and where each class of failure ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.agent_state import is_settled
from broker.contract.observations import AgentStateChangedObservation
from broker.runtime.errors import StoreUnavailable
from controller_worker.core.effects import CallModel, Park, Rest
from controller_worker.core.failures import RATE_LIMIT, find_error_code, find_waiting_state
from controller_worker.providers.errors import MODEL_ERRORS, LLMConfigError
from tests.controller_parts import started

RETRIED = ["internal", "malformed_reply", "no_response", "rate_limit", "service_unavailable", "timeout"]


CODES = [*MODEL_ERRORS, LLMConfigError.code, "hook_veto", "max_budget", "unexpected"]


def test_what_is_tried_again_is_what_its_class_says() -> None:
    assert sorted(code for code, error in MODEL_ERRORS.items() if error.retryable) == RETRIED


def test_only_a_rate_limit_shows_while_it_is_waited_for() -> None:
    assert [code for code in CODES if find_waiting_state(code).value != "running"] == [RATE_LIMIT]


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
    change = core.events[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert (change.agent_state.value, change.reason, change.code) == ("error", text, code)
    assert is_settled(core.state.lifecycle.agent_state)
    assert (core.state.lifecycle.error_code, core.state.lifecycle.last_error) == (code, text)


def test_a_code_of_another_version_is_tried_again() -> None:
    core = started()
    assert core.fail("solar_storm", retry_in=8) == Park(core.now + timedelta(seconds=8), "solar_storm")


def test_going_on_forgets_the_error() -> None:
    core = started()
    core.fail("authentication", retry_in=None)
    core.say()
    core.run()
    assert (core.state.lifecycle.error_code, core.state.lifecycle.last_error) == ("", "")


def test_an_error_that_nobody_foresaw_has_a_code_too() -> None:
    assert find_error_code(KeyError("x")) == "unexpected"
    assert find_error_code(StoreUnavailable("gone")) == "store_unavailable"
