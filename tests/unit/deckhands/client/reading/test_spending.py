"""The cost of a conversation by purpose."""

from __future__ import annotations

import pytest

from broker.contract.events import ModelCallFailed, ModelReply
from deckhands.client.reading.spending import Spending, compute_spending
from tests.controller_parts import Core, call, started, think


def parts(core: Core) -> tuple[float, float, float, float]:
    found = compute_spending(core.events)
    assert found.spent_usd == core.state.usage.cost_usd
    return found.work_usd, found.retries_usd, found.loops_usd, found.condensation_usd


def test_replies_that_lead_on_are_work() -> None:
    core = started()
    core.reply(think("a"))
    core.reply(think("b"))
    core.reply(text="That is all.")
    assert parts(core) == (0.75, 0.0, 0.0, 0.0)


def test_a_reply_that_cannot_be_understood_is_a_retry() -> None:
    core = started()
    core.reply(call("no_such_tool"))
    core.reply(think())
    assert parts(core) == (0.25, 0.25, 0.0, 0.0)


def test_a_reply_of_which_one_call_is_understood_is_work() -> None:
    core = started()
    core.reply(call("no_such_tool"), think())
    assert parts(core) == (0.25, 0.0, 0.0, 0.0)


def test_a_reply_like_the_one_before_is_a_loop() -> None:
    core = started()
    for thought in ("a", "a", "a", "b", "a"):
        core.reply(think(thought))
    assert parts(core) == (0.75, 0.0, 0.5, 0.0)


def test_a_condensation_is_neither() -> None:
    core = started()
    core.put(ModelReply(service="condenser", content="So far …", cost_usd=0.5))
    core.reply(think())
    assert parts(core) == (0.25, 0.0, 0.0, 0.5)


def test_verdicts_are_work_and_hide_no_loop() -> None:
    refused = ModelReply(service="critic", content="REFUSED There is no test.", cost_usd=0.5)
    finish = ModelReply(content="Done.", cost_usd=0.25)
    found = compute_spending([finish, refused, finish, refused])
    assert (found.work_usd, found.loops_usd) == (1.25, 0.25)


def test_failures_and_unknown_prices_are_counted() -> None:
    core = started()
    core.fail("internal", retry_in=1)
    core.pass_time(2)
    core.reply(think(), cost_usd=None)
    assert compute_spending(core.events) == Spending(calls=1, failed_calls=1, unpriced_calls=1)


def test_an_empty_log_has_cost_nothing() -> None:
    assert compute_spending([]) == Spending()


@pytest.mark.parametrize("times", [0, 3])
def test_sums(times: int) -> None:
    total = sum((Spending(work_usd=0.25, calls=1) for _ in range(times)), Spending())
    assert total == Spending(work_usd=0.25 * times, calls=times)


def test_a_failure_costs_nothing_known() -> None:
    assert compute_spending([ModelCallFailed(code="timeout")]).spent_usd == 0.0
