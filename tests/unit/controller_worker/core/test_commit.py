"""One commit: the events appended together, and its row in a listing."""

from datetime import UTC, datetime, timedelta

import pytest

from broker.contract.actions import AgentFinishAction, ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, EventSource, ModelReply
from broker.contract.policies import ConfirmationPolicy
from controller_worker.agents.tool_calls import MAX_CALLS
from controller_worker.core.commit import settle, to_index_fields
from controller_worker.core.effects import Append, CallModel, Effect, Rest
from tests.controller_parts import START, Core, answer, bash, said, started, think
from tests.scenarios import play

LATER = START + timedelta(seconds=90)


def test_events_are_numbered_and_stamped_and_the_turn_settled() -> None:
    core = started()
    commit = settle(core.state, Append((ModelReply(seen_id=6), AgentFinishAction())), LATER)
    assert [(event.id, event.kind, event.timestamp) for event in commit.events] == [
        (7, "model.reply", LATER),
        (8, "action.finish", LATER),
        (9, "observation.agent_state_changed", LATER),
    ]
    assert (commit.state.version, commit.state.lifecycle.agent_state) == (9, AgentState.FINISHED)


def test_a_time_that_was_given_stays() -> None:
    given = datetime(2020, 1, 1, tzinfo=UTC)
    commit = settle(started().state, Append((said("hi").model_copy(update={"timestamp": given}),)), LATER)
    assert commit.events[0].timestamp == given


def test_only_runnable_actions_of_this_commit_are_dispatched() -> None:
    core = started(agent=AgentSpec(tool_concurrency=2))
    core.reply(bash(call_id="a"))
    assert core.commits[-1].dispatch == [1]
    stop = ChangeAgentStateAction(agent_state=AgentState.PAUSED, source=EventSource.USER)
    paused = settle(core.state, Append((stop,)), START)
    assert paused.dispatch == []


def test_what_is_cancelled_first_is_not_forgotten_for_what_follows() -> None:
    core = started()
    core.reply(bash(call_id="a"))
    commit = settle(core.state, Append((said("more"),), cancels=(8,)), START)
    assert [event.kind for event in commit.events] == ["action.message", "action.recall", "observation.null"]
    assert commit.cancels == [8]


def test_a_large_turn_is_one_commit() -> None:
    core = started()
    core.reply(*(think(f"thought {n}", call_id=f"t{n}") for n in range(500)))
    assert len(core.commits[-1].events) == 1 + 2 * 128 + (500 - 128)


def test_a_listing_shows_the_state_and_the_numbers() -> None:
    core = started()
    core.reply(think())
    assert to_index_fields(core.state) == {
        "state": "running",
        "busy": "1",
        "wait_reason": "",
        "last_error": "",
        "error_code": "",
        "iterations": 1,
        "cost_usd": 0.25,
        "has_unknown_cost": 0,
        "prompt_tokens": 100,
        "completion_tokens": 10,
    }


@pytest.mark.parametrize(
    ("scenario", "shown"),
    [
        ("bash", {"state": "running", "wait_reason": "tool"}),
        ("bash, paused", {"state": "paused", "wait_reason": ""}),
        ("bash, stopped", {"state": "stopped", "wait_reason": ""}),
        ("fail rate_limit in 8", {"state": "rate_limited", "wait_reason": "rate_limit"}),
        (
            "fail rate_limit in 8, wait 8, fail authentication",
            {"state": "error", "wait_reason": "", "last_error": "Oops: no"},
        ),
    ],
)
def test_a_listing_shows_why_a_conversation_waits(scenario: str, shown: dict[str, str]) -> None:
    assert shown.items() <= to_index_fields(play(started(), scenario).state).items()


# Much that is due at once


def commits_until(core: Core, effect: Effect) -> int:
    """Let the core run until this effect; return how many commits it made."""
    before = len(core.commits)
    assert core.run() == effect
    return len(core.commits) - before


def test_many_messages_that_interrupt_many_actions_lead_to_one_commit() -> None:
    core = started(double_texting="interrupt")
    core.reply(*(bash(f"sleep {n}", call_id=f"c{n}") for n in range(MAX_CALLS)))
    core.put(*(said(f"message {n}") for n in range(1_000)))
    assert commits_until(core, CallModel(2, 1)) == 1
    assert len(core.commits[-1].answers) == MAX_CALLS


def test_many_requests_at_once_lead_to_the_last_one() -> None:
    core = started()
    for state in ["paused", "running"] * 500 + ["stopped"]:
        core.ask(state)
    assert commits_until(core, Rest()) == 1
    assert core.states() == ["running", "stopped"]


def test_many_results_at_once_lead_to_the_next_step() -> None:
    core = started(agent=AgentSpec(tool_concurrency=16))
    core.reply(*(bash(f"true {n}", call_id=f"c{n}") for n in range(MAX_CALLS)))
    core.put(*(answer(core.event(pending.id), str(pending.id)) for pending in core.state.tools.pending))
    assert core.run() == CallModel(2, 1)


def test_many_confirmations_lead_to_few_commits_each() -> None:
    core = started(agent=AgentSpec(confirmation=ConfirmationPolicy(mode="always")))
    core.reply(*(bash(f"true {n}", call_id=f"c{n}") for n in range(MAX_CALLS)))
    for _ in range(MAX_CALLS - 1):
        commits = len(core.commits)
        core.ask("user_confirmed")
        core.run()
        core.observe(core.state.confirmation.confirmed_id)
        assert len(core.commits) <= commits + 2
    core.ask("user_rejected")
    assert core.run() == Rest()
    assert core.state.tools.pending == ()
