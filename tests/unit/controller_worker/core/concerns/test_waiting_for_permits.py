"""Waits for a quota or a budget: visible state, effects meanwhile, and their end."""

from dataclasses import replace
from datetime import timedelta

import pytest

from broker.contract.events import ModelCallAdmitted, ModelCallDeferred, Tenancy
from controller_worker.core.commit import to_index_fields
from controller_worker.core.concerns.model_calls import find_recheck_time
from tests.controller_parts import START, Core, bash, started
from tests.scenarios import play, scenarios

BOTH = pytest.mark.parametrize("code", ["rate_limit", "waiting_for_budget"])


def deferral(code: str) -> ModelCallDeferred:
    soon = START + timedelta(seconds=40) if code == "rate_limit" else None
    return ModelCallDeferred(code=code, content="acme/large has no room for the call now.", expected_at=soon)


def deferred(code: str, **options: str) -> Core:
    core = started(**options)
    core.append(deferral(code))
    return core


def play_shown(core: Core, scenario: str) -> None:
    """Play a scenario; its last words, behind `shows`, are the state and the reason of the wait in a listing."""
    happens, _, shows = scenario.partition(", shows ")
    play(core, happens, admitted=lambda core: core.append(ModelCallAdmitted()))
    fields = to_index_fields(core.state)
    assert f"{fields['state']} {fields['wait_reason']}" == shows


@scenarios(
    {
        "a wait for a quota shows as a rate limit": (
            "trace 6: 7 ModelCallDeferred(environment); 8 SC rate_limited, shows rate_limited rate_limit"
        ),
        "a message is recalled while the call waits": (
            "say -> model 1, trace 8: 9 Message(user); 10 Recall(user) knowledge; 11 SC running; "
            "12 NullObs(environment, cause 10); 13 SC rate_limited, shows rate_limited rate_limit"
        ),
        "a stop during a shown wait is announced once": "stopped, states running rate_limited stopped, shows stopped ",
    }
)
def test_wait_for_a_quota(scenario: str) -> None:
    play_shown(deferred("rate_limit"), scenario)


@scenarios(
    {
        "the wait is the reason of a running conversation": (
            "trace 6: 7 ModelCallDeferred(environment), shows running waiting_for_budget"
        ),
        "a reply ends the wait whatever is shown": "think, shows running ",
        "a failed call ends the wait": "fail internal in 8, shows running internal",
    }
)
def test_wait_for_a_budget(scenario: str) -> None:
    play_shown(deferred("waiting_for_budget"), scenario)


@BOTH
@scenarios(
    {
        "an admission ends the wait": "admitted -> model 1, shows running ",
        "an admitted call continues": "admitted, finish -> rest, shows finished ",
        "a person may pause": "paused -> rest, shows paused ",
        "a person may stop": "stopped -> rest, shows stopped ",
        "a pause ends with a resume": "paused, running -> model 1, shows running ",
        "a stop ends with a resume": "stopped, running -> model 1, shows running ",
    }
)
def test_end_of_a_wait(code: str, scenario: str) -> None:
    play_shown(deferred(code), scenario)


@BOTH
def test_the_call_is_wanted_all_the_time(code: str) -> None:
    core = play(deferred(code), "wait 3600 -> model 1, wait 3600 -> model 1, wait 3600 -> model 1")
    core = deferred(code, double_texting="interrupt")
    play_shown(core, "say -> model 1, shows running ")  # the call that waited was replaced


@BOTH
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


def test_tenancy_is_part_of_the_state() -> None:
    tenancy = Tenancy(tenant="acme", priority="batch")
    assert (started().state.setup.tenancy, Core(tenancy=tenancy).state.setup.tenancy) == (Tenancy(), tenancy)
