"""Logs: each violation of an invariant is found, and the point at which a log is settled."""

from __future__ import annotations

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import ConfirmationStatus, Event, with_id
from broker.contract.recall import RecallAction, RecallType
from broker.log.invariants import count_duplicate_observations, count_lost_events, find_violations
from broker.log.status import fold_status
from tests.unit.deckhands.sample_log import (
    CONVERSATION_ID,
    command,
    created,
    finished_log,
    numbered,
    output,
    state,
    user,
)


def found(events: list[Event], **facts: object) -> list[tuple[str, int, str]]:
    listed = find_violations(events, conversation_id=CONVERSATION_ID, **facts)
    return [(violation.invariant, violation.event_id, violation.text) for violation in listed]


def test_a_whole_log_has_no_violations():
    log = finished_log()
    assert found(log, last_event_id=11, seen=log[:5]) == []
    assert (count_duplicate_observations(log), count_lost_events(log, log)) == (0, 0)


def test_a_gap():
    log = finished_log()
    del log[4]
    assert ("I2", 6, "event 6 is where event 5 belongs") in found(log)
    assert count_lost_events(log, []) == 1


def test_a_log_that_is_longer_in_the_index():
    assert found(finished_log(), last_event_id=12) == [("I2", 0, "the index says last_event_id 12, the log 11")]


def test_a_log_that_begins_with_something_else():
    log = numbered(*finished_log()[1:3], state("finished"))
    assert ("I2", 1, "the log does not begin with the creation of c1-sample") in found(log)


def test_a_log_of_another_conversation():
    log = numbered(created(conversation_id="other"), state("finished"))
    assert found(log) == [("I2", 1, "the log does not begin with the creation of c1-sample")]


def test_a_conversation_created_twice():
    log = numbered(created(), created(), state("finished"))
    assert found(log) == [("I2", 2, "the conversation is created a second time")]


def test_an_event_that_was_seen_and_is_gone():
    log = finished_log()
    gone = with_id(command("rm"), 12)
    assert found(log, seen=[gone]) == [("I3", 12, "event 12 (action.run) was seen and is missing")]
    assert count_lost_events(log, [gone]) == 1


def test_an_event_that_has_changed_since_it_was_seen():
    log = finished_log()
    before = log[6].model_copy(update={"command": "make check"})
    assert found(log, seen=[before]) == [("I3", 7, "event 7 has changed since it was seen")]


def test_an_action_without_observation():
    log = numbered(created(), user("go"), command("ls"), state("finished"))
    broken = [item for item in found(log) if item[0] == "I4"]
    assert broken == [("I4", 3, "action 3 (action.run) has no observation")]


@pytest.mark.parametrize("name", ["paused", "awaiting_user_confirmation"])
def test_an_action_may_still_be_open_while_the_agent_waits(name):
    assert found(numbered(created(), command("ls"), state(name))) == []


def test_an_action_that_waits_for_its_confirmation_is_settled_at_the_end():
    waiting = command("ls").model_copy(update={"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION})
    assert found(numbered(created(), waiting, state("awaiting_user_confirmation"))) == []
    broken = ("I4", 2, "action 2 (action.run) has no observation")
    assert found(numbered(created(), waiting, state("stopped"))) == [broken]


def test_action_may_be_open_in_a_growing_log():
    log = numbered(created(), user("go"), state("running"), command("ls"))
    assert found(log, is_over=False) == []


def test_two_observations_of_one_action():
    log = numbered(created(), command("ls"), output(2), output(2), state("finished"))
    text = "event 4 (observation.run) answers action 2, which event 3 has answered"
    assert found(log) == [("I4", 4, text)]
    assert count_duplicate_observations(log) == 1


@pytest.mark.parametrize(("cause", "event_id"), [(99, 3), (1, 3), (4, 3)])
def test_an_observation_of_nothing(cause, event_id):
    log = numbered(created(), user("go"), output(cause), command("ls"), output(4), state("finished"))
    assert ("I4", event_id, f"event 3 (observation.run) answers {cause}, not an earlier action") in found(log)


def test_a_conversation_that_never_came_to_rest():
    assert found(numbered(created(), state("running"))) == [("I1", 0, "the conversation ended in the state running")]


def test_a_message_that_was_never_read():
    log = [*finished_log(), with_id(user("hello?"), 12)]
    assert found(log) == [("I1", 0, "a message or request got no answer (the agent is finished)")]


def test_waiting_for_a_rate_limit_is_declared():
    assert found(numbered(created(), state("rate_limited"))) == []


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
