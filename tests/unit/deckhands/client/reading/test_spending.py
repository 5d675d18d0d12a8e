"""The cost of a conversation by purpose."""

from __future__ import annotations

import pytest

from broker.contract.events import ModelReply, ModelToolCall
from deckhands.client.reading.metrics import Spending, compute_spending
from tests.controller_parts import Core, call, started, think


def parts(core: Core) -> tuple[float, float, float, float]:
    found = compute_spending(core.events)
    assert found.spent_usd == core.state.usage.cost_usd
    return found.work_usd, found.retries_usd, found.loops_usd, found.condensation_usd


@pytest.mark.parametrize(
    ("replies", "spent"),
    [
        ([[think("a")], [think("b")]], (0.5, 0.0, 0.0, 0.0)),
        ([[call("no_such_tool")], [think()]], (0.25, 0.25, 0.0, 0.0)),
        ([[call("no_such_tool"), think()]], (0.25, 0.0, 0.0, 0.0)),
        ([[think(text)] for text in "aaaba"], (0.75, 0.0, 0.5, 0.0)),
    ],
    ids=["work", "retry", "one call is understood", "loop"],
)
def test_replies_are_work_retries_or_loops(
    replies: list[list[ModelToolCall]], spent: tuple[float, float, float, float]
) -> None:
    core = started()
    for calls in replies:
        core.reply(*calls)
    assert parts(core) == spent


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
