"""Waiting for a quota or a budget: what shows, what is wanted meanwhile, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import EventSource, ModelCallAdmitted, ModelCallDeferred, Tenancy
from controller_worker.core.commit import to_index_fields
from controller_worker.core.concerns.model_calls import find_recheck_time
from controller_worker.core.effects import CallModel, Rest
from controller_worker.core.state import parse_snapshot, to_snapshot
from tests.controller_parts import START, Core, bash, finish, started, think


def deferred(code: str) -> Core:
    core = started()
    soon = START + timedelta(seconds=40) if code == "rate_limit" else None
    core.append(ModelCallDeferred(code=code, content="acme/large has no room for the call now.", expected_at=soon))
    return core


def shown(core: Core) -> tuple[object, object]:
    fields = to_index_fields(core.state)
    return fields["state"], fields["wait_reason"]


def test_a_wait_for_a_quota_shows_as_a_rate_limit() -> None:
    core = deferred("rate_limit")
    assert core.trace(after=6) == ["7 ModelCallDeferred(environment)", "8 SC rate_limited"]
    assert shown(core) == ("rate_limited", "rate_limit")


def test_budget_wait_is_the_reason_of_a_running_conversation() -> None:
    core = deferred("waiting_for_budget")
    assert core.trace(after=6) == ["7 ModelCallDeferred(environment)"]
    assert shown(core) == ("running", "waiting_for_budget")


@pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])
def test_the_call_is_wanted_all_the_time(code: str) -> None:
    core = deferred(code)
    for _ in range(3):
        assert core.run() == CallModel(1, 1)
        core.pass_time(3600)


@pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])
def test_an_admission_ends_the_wait(code: str) -> None:
    core = deferred(code)
    assert core.append(ModelCallAdmitted()) == CallModel(1, 1)
    assert shown(core) == ("running", "")
    core.reply(finish())
    assert core.states()[-1] == "finished"


@pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])
@pytest.mark.parametrize("asked", ["paused", "stopped"])
def test_a_person_may_pause_or_stop_a_conversation_that_waits(code: str, asked: str) -> None:
    core = deferred(code)
    core.ask(asked)
    assert isinstance(core.run(), Rest)
    assert shown(core) == (asked, "")
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert shown(core) == ("running", "")


def test_a_message_is_recalled_while_the_call_waits() -> None:
    core = deferred("rate_limit")
    core.say()
    assert core.run() == CallModel(1, 1)
    assert core.trace(after=8) == [
        "9 Message(user)",
        "10 Recall(user) knowledge",
        "11 SC running",
        "12 NullObs(environment, cause 10)",
        "13 SC rate_limited",
    ]


@pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])
def test_interruption_ends_the_wait_of_the_replaced_call(code: str) -> None:
    core = Core(double_texting="interrupt")
    core.run()
    core.append(ModelCallDeferred(code=code, content="acme/large has no room for the call now."))
    core.say("rather this")
    assert core.run() == CallModel(1, 1)
    assert shown(core) == ("running", "")


def test_a_reply_ends_the_wait_whatever_was_told() -> None:
    core = deferred("waiting_for_budget")
    core.reply(think())
    assert core.state.calls.deferral is None


def test_a_failed_call_ends_the_wait() -> None:
    core = deferred("waiting_for_budget")
    core.fail("internal", retry_in=8)
    assert shown(core) == ("running", "internal")


@pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])
def test_waiting_call_is_retried_every_five_minutes(code: str) -> None:
    assert find_recheck_time(deferred(code).state, START, is_refused=False) == START + timedelta(minutes=5)


def test_awaited_tool_is_checked_each_minute_until_the_deadline() -> None:
    core = started()
    assert find_recheck_time(core.state, START, is_refused=False) is None
    assert find_recheck_time(core.state, START, is_refused=True) == START + timedelta(minutes=5)
    core.reply(bash())
    assert find_recheck_time(core.state, START, is_refused=False) == START + timedelta(minutes=1)
    hurried = replace(core.state, usage=replace(core.state.usage, deadline=START + timedelta(seconds=7)))
    assert find_recheck_time(hurried, START, is_refused=False) == START + timedelta(seconds=7)


def test_a_snapshot_keeps_the_wait() -> None:
    core = deferred("rate_limit")
    assert parse_snapshot(to_snapshot(core.state)) == core.state


def test_who_it_is_for_is_part_of_the_state() -> None:
    core = started()
    assert core.state.setup.tenancy == Tenancy()
    created = core.events[0].model_copy(update={"tenancy": Tenancy(tenant="acme", priority="batch"), "id": 0})
    other = Core(None)
    other.events.clear()
    other.state = type(other.state)()
    other.put(created)
    assert other.state.setup.tenancy == Tenancy(tenant="acme", priority="batch")


def test_stop_request_during_a_shown_wait_is_announced_once() -> None:
    core = deferred("rate_limit")
    core.put(ChangeAgentStateAction(agent_state=AgentState.STOPPED, source=EventSource.USER))
    core.run()
    assert core.states() == ["running", "rate_limited", "stopped"]
