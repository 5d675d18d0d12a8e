"""The rows of `deckhands top`, its head, and how it looks at a store of many conversations a few at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, EventSource
from broker.log.event_log import EventLog
from broker.store.store import Store
from deckhands.cli.tui.conversation_cache import FIELDS, SORTS, CachedConversation, ConversationCache, arrange, row_of
from deckhands.cli.tui.conversation_list import heading, row_text
from deckhands.cli.tui.overview import ClusterFacts, cluster_lines, conversation_line, queue_line, worker_line
from deckhands.client.reading.terminal import measure_width
from deckhands.operations.monitoring.census import WorkerMetrics
from deckhands.operations.monitoring.queues import Depth

ROWS = [
    CachedConversation(
        "c-1", "running", steps=3, cost_usd=0.5, updated=30.0, created=1.0, title="b", words="c-1 running b acme"
    ),
    CachedConversation(
        "c-2", "error", steps=9, cost_usd=0.1, updated=10.0, created=2.0, title="a", words="c-2 error a acme"
    ),
    CachedConversation(
        "c-3", "finished", steps=1, cost_usd=2.0, updated=20.0, created=3.0, title="c", words="c-3 finished c other"
    ),
]


def reply(**known: str) -> list[bytes | None]:
    return [known[name].encode() if name in known else None for name in FIELDS]


@pytest.mark.parametrize(
    ("by", "ids"),
    [("updated", "132"), ("age", "321"), ("cost", "312"), ("steps", "213"), ("state", "231"), ("title", "213")],
)
def test_rows_are_sorted_and_turned_round(by: str, ids: str):
    assert "".join(row.conversation_id[-1] for row in arrange(ROWS, by=by)) == ids
    assert "".join(row.conversation_id[-1] for row in arrange(ROWS, by=by, is_turned=True)) == ids[::-1]


def test_a_filter_wants_all_words_and_leaves_out_others():
    assert [row.conversation_id for row in arrange(ROWS, words="acme")] == ["c-1", "c-2"]
    assert [row.conversation_id for row in arrange(ROWS, words="ACME -error")] == ["c-1"]
    assert arrange(ROWS, words="acme finished") == []
    assert len(arrange(ROWS, words="-")) == 3


def test_conversation_in_the_store_becomes_a_row():
    row = row_of(
        "c-1",
        reply(last_id="7", state="running", wait_reason="tool", owner="w1", iterations="3", cost_usd="0.25",
              prompt_tokens="900", completion_tokens="100", updated_ms="2000", created_ms="1000", title="Fix\x1b]0;it\x07",
              tenant="acme", labels='{"team": "billing"}'),
    )  # fmt: skip
    assert row == CachedConversation(
        "c-1", "running", "tool", "w1", 3, 0.25, 1_000, 2.0, 1.0, r"Fix\x1b]0;it\x07", "acme"
    )
    cheap = reply(last_id="1", cost_usd="0.25", has_unknown_cost="1")
    free = reply(last_id="1", has_unknown_cost="1")
    assert [
        ">=$0.2500" in row_text(row_of("c-1", cheap), 120, 9.0),
        "unknown" in row_text(row_of("c-1", free), 120, 9.0),
    ]
    assert arrange([row], words="team=billing tool w1") == [row]
    assert row_of("c-1", reply(state="running")) is None
    assert row_of("c-1", None) is None
    assert row_of("c-1", reply(last_id="1", state="running"), is_dead=True).state == "dead"
    forged = row_of("c-1", reply(last_id="x", iterations="nan", cost_usd="-1e999", labels="[" * 100_000))
    assert (forged.steps, forged.cost_usd) == (0, 0.0)


@given(title=st.text(max_size=80), columns=st.integers(1, 200))
def test_a_row_takes_exactly_the_width_of_the_screen(title: str, columns: int):
    row = row_of("c-1", reply(last_id="1", state="running", title=title.encode("utf-8", "replace").decode()))
    line = row_text(row, columns, 100.0)
    assert measure_width(line) <= columns
    assert not set(line) & set("\x1b\x9b\n\r\u202e")


def test_the_heading_marks_the_order():
    assert "UPDATEDv" in heading(120, by="updated", is_turned=False)
    assert "COST^" in heading(120, by="cost", is_turned=True)
    assert "TOKENS" not in heading(80, by="cost", is_turned=False)
    assert all(heading(120, by=by, is_turned=False) for by in SORTS)


def test_the_head_says_who_works_and_what_waits():
    workers = [
        WorkerMetrics("controller", "n1:controller:1", 1.0, {"conversations": {"": 12.0}}, frozenset()),
        WorkerMetrics("tool", "n1:tool:2", 1.0, {"running": {"": 3.0}, "host_cpu": {"": 0.5}}, frozenset()),
        WorkerMetrics("tool", "n2:tool\x1b[2J", -70.0, {}, frozenset()),
    ]
    queues = {"ready": Depth(5.0, 2.0, 1.0, 12.0), "pool:bash": Depth()}
    facts = ClusterFacts(workers, queues, 2.5, 3.0)
    assert worker_line(facts) == "Workers: controller 1 (12 held) · tool 1 (3 running, 1 silent)"
    assert queue_line(facts) == "Queues: ready 7 (oldest 0:12)"
    rows = [*ROWS, CachedConversation("c-4", "running", "rate_limit")]
    line = conversation_line(rows, facts)
    assert line == (
        "Conversations: 4 · 2 running · 1 error · 1 finished · 1 wait for rate limit · 2.5 steps/s · $3.00/h"
    )
    assert worker_line(ClusterFacts()) == "Workers: none"
    assert queue_line(ClusterFacts()) == "Queues: empty"
    lines = "\n".join(cluster_lines(facts))
    assert "silent for 1:10" in lines
    assert "cpu 50%" in lines
    assert "5 waiting, 2 in line, 1 with workers" in lines
    assert "\x1b" not in lines


async def begin(store: Store, *names: str) -> None:
    for name in names:
        created = ConversationCreated(conversation_id=name, source=EventSource.USER, title=name)
        await EventLog(store).create(created, [MessageAction(content="Do it.", source=EventSource.USER)])


async def test_many_conversations_are_looked_at_a_few_at_a_time(store: Store):
    names = [f"c-{number:03}" for number in range(40)]
    await begin(store, *names)
    cache = ConversationCache(store, rows_at_once=20, others_at_once=5)
    async for _ in cache.load():
        pass
    assert set(cache.rows) == set(names)
    assert not await cache.refresh([], [])
    await begin(store, "new-1", "new-2")
    assert await cache.refresh([], [])
    assert {"new-1", "new-2"} <= set(cache.rows)
    await store.connection.call_many([("HSET", store.known_keys(name).meta, "iterations", "7") for name in names])
    assert await cache.refresh(["c-001", "c-002"], [])
    assert cache.rows["c-001"].steps == cache.rows["c-002"].steps == 7
    looks = 0
    while any(cache.rows[name].steps != 7 for name in names):
        await cache.refresh([], [])
        looks += 1
    assert looks > 1, "one look has asked for everything"
    shard = store.known_keys("c-003").shard
    await store.connection.call("SADD", shard.worker_conversations("w1"), "c-003")
    await store.connection.call("HSET", store.known_keys("c-003").meta, "iterations", "8")
    await store.connection.call("ZADD", shard.dead, 1, "c-004")
    await cache.refresh([], ["w1"])
    assert cache.rows["c-003"].steps == 8, "what a worker has is looked at each time"
    assert cache.rows["c-004"].state == "dead"
    await store.connection.call("ZREM", shard.dead, "c-004")
    await cache.refresh([], ["w1"])
    assert cache.rows["c-004"].state == "loading"
    await store.connection.call("DEL", store.known_keys("c-001").meta)
    await cache.refresh(["c-001"], [])
    assert "c-001" not in cache.rows
