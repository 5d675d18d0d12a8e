"""Logs: each violation of an invariant is found, and the point at which a log is settled."""

from __future__ import annotations

from typing import Any

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


LOG = finished_log()
WAITING = command("ls").model_copy(update={"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION})
BAD_START = ("I2", 1, "the log does not begin with the creation of c1-sample")
UNOBSERVED = ("I4", 2, "action 2 (action.run) has no observation")
LOGS: dict[str, tuple[list[Event], dict[str, Any], list[tuple[str, int, str]]]] = {
    "longer in the index": (LOG, {"last_event_id": 12}, [("I2", 0, "the index says last_event_id 12, the log 11")]),
    "starts with another event": (numbered(state("running"), state("finished")), {}, [BAD_START]),
    "of another conversation": (numbered(created(conversation_id="other"), state("finished")), {}, [BAD_START]),
    "created twice": (
        numbered(created(), created(), state("finished")),
        {},
        [("I2", 2, "the conversation is created a second time")],
    ),
    "seen and gone": (
        LOG,
        {"seen": [with_id(command("rm"), 12)]},
        [("I3", 12, "event 12 (action.run) was seen and is missing")],
    ),
    "changed since it was seen": (
        LOG,
        {"seen": [LOG[6].model_copy(update={"command": "make check"})]},
        [("I3", 7, "event 7 has changed since it was seen")],
    ),
    "action without observation": (numbered(created(), command("ls"), state("finished")), {}, [UNOBSERVED]),
    "open while paused": (numbered(created(), command("ls"), state("paused")), {}, []),
    "open while it asks": (numbered(created(), WAITING, state("awaiting_user_confirmation")), {}, []),
    "asked and stopped": (numbered(created(), WAITING, state("stopped")), {}, [UNOBSERVED]),
    "open while it grows": (numbered(created(), state("running"), command("ls")), {"is_over": False}, []),
    "observed twice": (
        numbered(created(), command("ls"), output(2), output(2), state("finished")),
        {},
        [("I4", 4, "event 4 (observation.run) answers action 2, which event 3 has answered")],
    ),
    **{
        f"observation of {cause}": (
            numbered(created(), output(cause), command("ls"), output(3), state("finished")),
            {},
            [("I4", 2, f"event 2 (observation.run) answers {cause}, not an earlier action")],
        )
        for cause in (99, 1, 3)
    },
    "never at rest": (
        numbered(created(), state("running")),
        {},
        [("I1", 0, "the conversation ended in the state running")],
    ),
    "message never read": (
        [*LOG, with_id(user("hello?"), 12)],
        {},
        [("I1", 0, "a message or request got no answer (the agent is finished)")],
    ),
    "declared wait": (numbered(created(), state("rate_limited")), {}, []),
}


@pytest.mark.parametrize(("log", "facts", "expected"), LOGS.values(), ids=LOGS)
def test_violations_of_a_log(log: list[Event], facts: dict[str, Any], expected: list[tuple[str, int, str]]) -> None:
    assert found(log, **facts) == expected


def test_duplicates_and_losses_are_counted() -> None:
    log, facts, _ = LOGS["observed twice"]
    assert count_duplicate_observations(log) == 1
    log, facts, _ = LOGS["seen and gone"]
    assert count_lost_events(log, facts["seen"]) == 1


def ask(name: str) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(agent_state=AgentState(name), source="user")


def recall() -> RecallAction:
    return RecallAction(recall_type=RecallType.KNOWLEDGE)


def test_message_after_the_end_unsettles_until_work_ends():
    after_message = fold_status([*finished_log(), user("one more thing")])
    assert (after_message.is_settled, after_message.is_terminal) == (False, False)
    begun = after_message.apply(recall()).apply(state("running"))
    assert not begun.is_settled
    assert begun.apply(state("finished")).is_settled


def test_a_request_counts_until_it_is_announced():
    asked = fold_status(numbered(created(), state("paused"), ask("stopped")))
    assert (asked.is_settled, asked.is_unanswered) == (False, True)
    assert asked.apply(state("stopped")).is_settled


SETTLED: dict[str, tuple[list[Event], bool, bool]] = {
    "finished": (LOG, True, True),
    "error": (numbered(created(), user("go"), state("error", "RuntimeError: unknown agent")), True, True),
    "message to a running agent": (
        numbered(created(), user("go"), state("running"), user("faster"), recall(), state("finished")),
        True,
        True,
    ),
    **{
        name: (numbered(created(), state(name)), True, False)
        for name in ("paused", "awaiting_user_input", "awaiting_user_confirmation")
    },
    **{
        name: (numbered(created(), state(name)), False, False)
        for name in ("loading", "running", "rate_limited", "user_confirmed")
    },
    "request for the current state": (numbered(created(), state("paused"), ask("paused")), True, False),
    "withdrawn request": (numbered(created(), state("paused"), ask("running"), ask("paused")), True, False),
    "request for an error": (numbered(created(), state("finished"), ask("error")), True, True),
}


@pytest.mark.parametrize(("log", "is_settled", "is_terminal"), SETTLED.values(), ids=SETTLED)
def test_settled_and_terminal_logs(log: list[Event], is_settled: bool, is_terminal: bool) -> None:
    status = fold_status(log)
    assert (status.is_settled, status.is_terminal) == (is_settled, is_terminal)


def test_requested_pause_is_not_answered_by_the_start():
    found = fold_status(numbered(created(), user("go"), ask("paused"), state("running")))
    assert (found.requested, found.is_settled) == ("paused", False)
