"""Tools that cannot be offered: who reads why, and what of a report is shown."""

from __future__ import annotations

import asyncio
import json

import pytest

from broker.coordination.membership import Membership
from broker.runtime.errors import UsageError
from broker.store.store import Store
from broker.tools.tool_failures import MAX_FAILURES, MAX_REASON_CHARS, SANDBOX, ToolFailure, ToolFailures
from broker.tools.tool_offers import ToolOffers

MISSING = ToolFailure(
    source="shop.tools:stock", reason="ModuleNotFoundError: No module named 'shop'", remedy="Install."
)
DEAD = ToolFailure(source="the MCP server time", server="time", reason="Connection closed", remedy="Correct it.")
LIMIT_SECONDS = 600.0
"""Far more than the test may take: what is known is not waited for."""


async def worker(store: Store, name: str, *failures: ToolFailure) -> Membership:
    membership = Membership(store, name, "tool", about={"node": f"node-of-{name}"})
    await membership.register()
    await ToolFailures(store).report(name, failures)
    return membership


async def refusal(store: Store, *patterns: str) -> str:
    with pytest.raises(UsageError) as refused:
        await ToolOffers(store).choose(patterns, limit_seconds=LIMIT_SECONDS)
    return str(refused.value)


async def test_missing_tools_reason_is_read_at_once(store: Store) -> None:
    await worker(store, "t1", MISSING)
    assert await refusal(store, "stock") == (
        "No tool worker offers the tool 'stock'. The tool worker t1 (node node-of-t1) cannot load tools from "
        "shop.tools:stock: ModuleNotFoundError: No module named 'shop'. Install. Offered: none."
    )


async def test_a_failure_that_is_reported_while_somebody_waits(store: Store) -> None:
    asking = asyncio.create_task(refusal(store, "time/*"))
    await asyncio.sleep(0)
    await worker(store, "t1", DEAD)
    async with asyncio.timeout(20):
        assert "cannot load tools from the MCP server time: Connection closed. Correct it." in await asking


@pytest.mark.parametrize(
    ("failure", "pattern", "explains"),
    [
        (MISSING, "stock", True),
        (MISSING, "st*", True),
        (MISSING, "time/now", False),
        (DEAD, "time/now", True),
        (DEAD, "ti*/now", True),
        (DEAD, "*", True),
        (DEAD, "time", False),
        (DEAD, "issues/list", False),
        (ToolFailure(source=SANDBOX, reason="x"), "stock", False),
    ],
)
def test_what_a_failure_may_explain(failure: ToolFailure, pattern: str, explains: bool) -> None:
    assert failure.may_explain(pattern) is explains


async def test_only_what_running_workers_report_now_counts(store: Store) -> None:
    await worker(store, "t1", MISSING)
    second = await worker(store, "t2", DEAD)
    assert [(one.worker_id, one.failure) for one in await ToolFailures(store).load_all()] == [
        ("t1", MISSING),
        ("t2", DEAD),
    ]
    await ToolFailures(store).report("t1", ())
    await second.leave()
    assert await ToolFailures(store).load_all() == []
    await worker(store, "t3", MISSING)
    assert (await store.connection.call("HGETALL", "deck:tools:failed"))[::2] == [b"t3"]


async def test_a_report_is_shown_as_bounded_lines_of_plain_text(store: Store) -> None:
    await worker(store, "t1", *[MISSING] * (2 * MAX_FAILURES))
    assert len(await ToolFailures(store).load_all()) == MAX_FAILURES
    forged = {"source": "x\x1b[2J\ny", "reason": "r\u202e" * 100_000, "remedy": "\x9b1m", "server": ""}
    for text in ("[", "{}", "7", json.dumps([7]), "[" * 100_000, json.dumps([{"source": 3}])):
        await store.connection.call("HSET", "deck:tools:failed", "t1", text)
        assert await ToolFailures(store).load_all() == []
    await store.connection.call("HSET", "deck:tools:failed", "t1", json.dumps([{**forged, "reason": "r\u202e" * 900}]))
    (shown,) = await ToolFailures(store).load_all()
    assert str(shown).isprintable()
    assert (shown.failure.source, shown.failure.remedy) == ("x [2J y", "1m")
    assert len(shown.failure.reason) == MAX_REASON_CHARS
    await store.connection.call("HSET", "deck:tools:failed", "t1", json.dumps([forged]))
    assert await ToolFailures(store).load_all() == []


async def test_a_key_of_another_type_stops_nobody(store: Store) -> None:
    await store.connection.call("SET", "deck:tools:failed", "no hash")
    await worker(store, "t1", MISSING)
    assert await ToolFailures(store).load_all() == []
