"""When a log is settled: the moment after which nothing happens until somebody speaks up."""

from __future__ import annotations

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.recall import RecallAction, RecallType
from broker.log.status import fold_status
from tests.unit.deckhands.sample_log import created, finished_log, numbered, state, user


def ask(name: str) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(agent_state=AgentState(name), source="user")


def recall() -> RecallAction:
    return RecallAction(recall_type=RecallType.KNOWLEDGE)


def test_a_finished_log_is_settled_and_over():
    found = fold_status(finished_log())
    assert (found.state, found.is_settled, found.is_terminal) == ("finished", True, True)


def test_message_after_the_end_unsettles_until_work_ends():
    after_message = fold_status([*finished_log(), user("one more thing")])
    assert (after_message.is_settled, after_message.is_terminal) == (False, False)
    begun = after_message.apply(recall()).apply(state("running"))
    assert not begun.is_settled
    assert begun.apply(state("finished")).is_settled


def test_message_to_a_running_agent_does_not_delay_settling():
    found = fold_status(numbered(created(), user("go"), state("running"), user("faster"), recall(), state("finished")))
    assert found.is_settled


@pytest.mark.parametrize("name", ["paused", "awaiting_user_input", "awaiting_user_confirmation"])
def test_waiting_for_a_person_is_settled_but_not_over(name):
    found = fold_status(numbered(created(), state(name)))
    assert (found.is_settled, found.is_terminal) == (True, False)


@pytest.mark.parametrize("name", ["loading", "running", "rate_limited", "user_confirmed"])
def test_these_states_go_on_by_themselves(name):
    assert not fold_status(numbered(created(), state(name))).is_settled


def test_a_request_counts_until_it_is_announced():
    asked = fold_status(numbered(created(), state("paused"), ask("stopped")))
    assert (asked.is_settled, asked.is_unanswered) == (False, True)
    assert asked.apply(state("stopped")).is_settled


def test_asking_for_the_state_it_is_in_changes_nothing():
    assert fold_status(numbered(created(), state("paused"), ask("paused"))).is_settled


def test_request_for_the_current_state_withdraws_an_earlier_one():
    assert fold_status(numbered(created(), state("paused"), ask("running"), ask("paused"))).is_settled


def test_requests_that_nobody_may_make_change_nothing():
    assert fold_status(numbered(created(), state("finished"), ask("error"))).is_settled


def test_an_error_answers_whatever_was_asked():
    found = fold_status(numbered(created(), user("go"), state("error", "RuntimeError: unknown agent")))
    assert (found.is_settled, found.is_terminal, found.reason) == (True, True, "RuntimeError: unknown agent")


def test_requested_pause_is_not_answered_by_the_start():
    found = fold_status(numbered(created(), user("go"), ask("paused"), state("running")))
    assert (found.requested, found.is_settled) == ("paused", False)
