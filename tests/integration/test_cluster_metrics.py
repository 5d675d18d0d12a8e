"""The metrics of a cluster: their values, and that no content of the store can spoil them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.coordination.membership import (
    BEATS_PER_FACTS,
    FIELD,
    MAX_LABELS,
    MAX_TEXT_CHARS,
    OTHER,
    Figures,
    Membership,
    read_figures,
)
from broker.limits.tenants import TenantRule, TenantTable, publish_tenants
from broker.log.event_log import EventLog
from broker.runtime.errors import AdmissionRefused
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store, open_store
from deckhands.operations.monitoring.exposition import FRESH_SECONDS, REFUSAL_REASONS, Exposition
from deckhands.operations.monitoring.families import FAMILIES, MAX_LABEL_VALUES, MAX_WORKERS
from deckhands.operations.monitoring.queues import MAX_MARK_BYTES, MAX_MARKS, CeleryWaits
from tests.broker_parts import CID, act, begin, claim, enter, lapse
from tests.served_stores import refusals, serving
from tests.source_code import ROOT
from tests.stores import RealServer, emptied

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_in(text: bytes) -> Samples:
    """Parse an exposition; fails where it is not well formed."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value_of(samples: Samples, name: str, **labels: str) -> float:
    """Sum the samples that have these labels."""
    return sum(
        value for (found, has), value in samples.items() if found == name and labels.items() <= dict(has).items()
    )


async def join(store: Store, worker_id: str) -> Membership:
    """Enter a tool worker."""
    streams = [[names.actions("pool:bash")] for names in store.all_shards]
    membership = Membership(store, worker_id, "tool", streams=streams, ttl_seconds=3600.0)
    await membership.register()
    return membership


async def look(store: Store, **options: Any) -> Samples:
    return samples_in(await Exposition(store, **options).text())


async def test_states_queues_and_workers_are_read_from_the_store(valkey_store: Store) -> None:
    store = valkey_store
    await enter(store, "controller-1")
    await join(store, "tool-1")
    await begin(store)
    await act(store, "controller-1")
    await begin(store, "c-2")
    found = await look(store)
    assert value_of(found, "deckhands_store_up") == 1
    assert value_of(found, "deckhands_scrape_failures") == 0
    assert value_of(found, "deckhands_conversations") == 2
    assert value_of(found, "deckhands_queue_entries", queue="pool:bash", standing="waiting") == 1
    assert value_of(found, "deckhands_queue_entries", queue="ready", standing="waiting") >= 1
    assert value_of(found, "deckhands_queue_oldest_seconds", queue="pool:bash") >= 0
    assert value_of(found, "deckhands_unclaimed_conversations") == 1
    assert value_of(found, "deckhands_workers") == 2
    assert value_of(found, "deckhands_store_memory_bytes") > 100_000


async def test_takeovers_are_counted(valkey_store: Store) -> None:
    store = valkey_store
    await enter(store, "controller-1")
    await begin(store)
    await act(store, "controller-1")
    await lapse(store, "controller-1")
    other = await enter(store, "controller-2")
    await other.beat(1)
    await claim(store, "controller-2")
    assert value_of(await look(store), "deckhands_takeovers_total") == 1


async def test_refused_beginnings_are_counted_by_reason(valkey_store: Store) -> None:
    names = valkey_store.all_shards[0]
    rules = {"narrow": TenantRule(max_open=1), "slow": TenantRule(submissions_per_minute=1)}
    await publish_tenants(valkey_store, TenantTable(rules=rules), None)
    for tenant, refused in (("narrow", 2), ("slow", 1)):
        for number in range(1 + refused):
            created = ConversationCreated(conversation_id=f"{tenant}-{number}", tenancy=Tenancy(tenant=tenant))
            with contextlib.suppress(AdmissionRefused):
                await EventLog(valkey_store).create(created)
    found = await look(valkey_store)
    counted = {
        reason: value_of(found, "deckhands_refused_beginnings_total", reason=reason) for reason in REFUSAL_REASONS
    }
    assert counted == {"open": 2.0, "pace": 1.0, "memory": 0.0}
    await valkey_store.connection.call("DEL", names.refused)
    await valkey_store.connection.call("HSET", names.refused, "open", "forged", "pace", "-inf", "x" * 1_000, "7")
    created = ConversationCreated(conversation_id="narrow-9", tenancy=Tenancy(tenant="narrow"))
    with pytest.raises(AdmissionRefused):  # all the same
        await EventLog(valkey_store).create(created)
    forged = await look(valkey_store)
    assert (
        sum(value_of(forged, "deckhands_refused_beginnings_total", reason=reason) for reason in REFUSAL_REASONS) == 0.0
    )
    assert value_of(forged, "deckhands_scrape_failures") == 0.0


async def test_all_shards_count(valkey_server: RealServer) -> None:
    store = await open_store(await emptied(valkey_server.url), shards=3)
    try:
        membership = await join(store, "tool-1")
        membership.figures.add("actions", 1, "observation.run")
        await membership.register()
        for number in range(6):
            await begin(store, f"c-{number}")
        found = await look(store)
        assert value_of(found, "deckhands_conversations") == 6
        assert value_of(found, "deckhands_queue_entries", queue="ready", standing="waiting") == 6
        assert value_of(found, "deckhands_actions_total") == 1
    finally:
        await store.aclose()


async def test_figures_travel_with_the_heartbeat(valkey_store: Store) -> None:
    membership = await join(valkey_store, "tool-1")
    membership.figures.add("actions", 3, "observation.run")
    membership.figures.record_lag(0.25)
    for _ in range(BEATS_PER_FACTS):
        await membership.beat(0)
    found = await look(valkey_store)
    labels = {"worker": "tool-1", "role": "tool"}
    assert value_of(found, "deckhands_actions_total", kind="observation.run", **labels) == 3
    assert value_of(found, "deckhands_loop_lag_seconds", **labels) == 0.25
    assert value_of(found, "deckhands_loop_late_seconds_total", **labels) == 0.25


async def test_figures_of_the_asking_server_are_included(valkey_store: Store) -> None:
    found = await look(valkey_store, own=lambda: {"streams": {"": 7.0}})
    assert value_of(found, "deckhands_streams", role="server") == 7


GARBAGE = [
    "", "null", "[]", "{", '{"steps": 3}', '{"steps": {"": "many"}}', '{"steps": {"": NaN}}', '{"steps": {"": 1e999}}',
    '{"steps": {"": -4}}', '{"steps": {"": true}}', '{"cost_usd": {"\\"}\\nfake 1": 1}}', '{"cost_usd": {"\\ud800": 2}}',
    json.dumps({"cost_usd": {f"m{n}": 1 for n in range(10_000)}}), "[" * 100_000, '{"steps": {"": ' + "9" * 5_000 + "}}",
]  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
async def test_figures_that_somebody_forged_spoil_nothing(memory_store: Store, text: str) -> None:
    names = memory_store.all_shards[0]
    await join(memory_store, "tool-1")
    await memory_store.connection.call("HSET", names.worker_facts("tool-1"), FIELD, text.encode(errors="surrogatepass"))
    found = samples_in(await Exposition(memory_store).text())
    assert value_of(found, "deckhands_workers") == 1
    assert len(found) < 500
    assert all(value >= 0 for value in found.values())


async def test_keys_of_another_type_spoil_nothing_else(valkey_store: Store) -> None:
    store = valkey_store
    names = store.all_shards[0]
    await join(store, "tool-1")
    await begin(store, "c-2")
    call = store.connection.call
    keys = (names.parked, names.dead, names.takeovers, names.quarantine, names.ready, names.actions("pool:bash"))
    keys += (
        f"{names.root}:unread",
        store.known_keys("c-2").meta,
        "deck:inbox",
        "deck:tools",
        f"{names.root}:turns:ready:1",
    )
    for key in keys:
        await call("DEL", key)
        await call("SET", key, "x")
    found = await look(store)
    assert value_of(found, "deckhands_store_up") == 1
    assert value_of(found, "deckhands_scrape_failures") == 0
    assert value_of(found, "deckhands_workers", role="tool") == 1
    assert value_of(found, "deckhands_conversations", state=OTHER, wait_reason="") == 1


async def test_names_that_somebody_chose_are_bounded(valkey_store: Store) -> None:
    store = valkey_store
    names = store.all_shards[0]
    for worker in range(4):
        membership = await join(store, f"tool-{worker}")
        for label in range(2 * MAX_LABELS):
            membership.figures.add("cost_usd", 1.0, f"model-{worker}-{label}")
        await membership.register()
    for number in range(MAX_WORKERS + 50):
        await store.connection.call("ZADD", names.workers, 1, f'ghost-{number}\x00\n"')
    streams = " ".join(f"{names.root}:act:pool:p{number}" for number in range(3 * MAX_LABEL_VALUES))
    await store.connection.call(
        "HSET", names.worker_facts("tool-0"), "streams", f"{streams} deck:secret", "role", "x" * 9_999
    )
    await begin(store, "c-2")
    await store.connection.call(
        "HSET", store.known_keys("c-2").meta, "state", "free\ntext", "wait_reason", "of a tenant"
    )
    found = await look(store)
    assert (
        len({dict(labels)["model"] for name, labels in found if name == "deckhands_cost_usd_total"})
        <= MAX_LABEL_VALUES + 1
    )
    assert value_of(found, "deckhands_cost_usd_total") == 4 * 2 * MAX_LABELS
    queues = {dict(labels)["queue"] for name, labels in found if name == "deckhands_queue_entries"}
    assert len(queues) <= MAX_LABEL_VALUES + 5
    assert value_of(found, "deckhands_conversations", state=OTHER, wait_reason=OTHER) == 1
    assert value_of(found, "deckhands_workers_lapsed") <= MAX_WORKERS
    assert {dict(labels)["role"] for name, labels in found if name == "deckhands_workers"} <= {"tool", OTHER}


@pytest.fixture
async def stopped(valkey_server: RealServer, valkey_store: Store) -> AsyncIterator[Store]:
    """A store whose server has ended since it was opened."""
    valkey_server.stop()
    yield valkey_store
    valkey_server.start()


async def test_a_store_that_is_away_is_one_figure(stopped: Store) -> None:
    found = await look(stopped)
    assert value_of(found, "deckhands_store_up") == 0
    assert value_of(found, "deckhands_scrape_failures") == 3


async def test_questions_within_a_second_share_one_look(memory_store: Store) -> None:
    exposition = Exposition(memory_store)
    first = await exposition.text()
    await begin(memory_store, CID)
    assert await exposition.text() is first, f"asked again within {FRESH_SECONDS} s"


def test_every_family_has_a_name_of_its_own() -> None:
    assert len({family.sample_name for family in FAMILIES}) == len(FAMILIES)
    assert all(family.name.startswith("deckhands_") and family.help for family in FAMILIES)


@pytest.mark.parametrize("letter", ["x", "ä", "\\", '"', "\x00", "\ud800", "😀"])
def test_model_names_cannot_make_the_metrics_too_long(letter: str) -> None:
    figures = Figures()
    names = (
        "model_seconds",
        "cost_usd",
        "prompt_tokens",
        "completion_tokens",
        "cache_read_tokens",
        "calls_without_price",
    )
    for name in names:
        for number in range(2 * MAX_LABELS):
            figures.add(name, 2.0**52 + 0.5, f"{number}{letter * 500}")
    assert len(figures.render()) < MAX_TEXT_CHARS / 2
    assert read_figures(figures.render()).keys() == set(names)


def test_a_figure_has_a_bounded_number_of_labels() -> None:
    figures = Figures()
    for number in range(3 * MAX_LABELS):
        figures.add("cost_usd", 1.0, f"{number}-" + "x" * 500)
    (values,) = read_figures(figures.render()).values()
    assert len(values) == MAX_LABELS + 1
    assert values[OTHER] == 2 * MAX_LABELS


def test_the_page_has_every_family() -> None:
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    rows = [
        f"| `{family.sample_name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.help} |"
        for family in FAMILIES
    ]
    assert [line for line in page.splitlines() if line.startswith("| `deckhands_")] == rows


async def test_a_worker_s_rights_suffice(tmp_path: Path, programs: dict[str, str]) -> None:
    async with serving("log", tmp_path / "log", programs) as log, serving("queue", tmp_path / "q", programs) as queue:
        await (await open_store(log.admin)).aclose()
        store, celery = await open_store(log.operator), MultiplexedConnection(queue.queue)
        await join(store, "tool-1")
        await enter(store, "controller-1")
        await begin(store)
        await act(store, "controller-1")
        found = await look(store, celery=celery)
        assert await refusals(log) == []
        assert value_of(found, "deckhands_scrape_failures") == 0
        assert value_of(found, "deckhands_conversations") == 1
        assert value_of(found, "deckhands_queue_entries", queue="pool:bash", standing="waiting") == 1
        assert value_of(found, "deckhands_store_memory_bytes") > 0
        await store.aclose()
        await celery.aclose()


async def test_the_oldest_entry_of_a_celery_list_has_an_age(valkey_server: RealServer) -> None:
    celery, waits, key = MultiplexedConnection(await emptied(valkey_server.url)), CeleryWaits(), "deckhands"

    async def age(now: float) -> float:
        return await waits.oldest_seconds(celery, key, await celery.call("LLEN", key), now)

    async def push(first: int, number: int) -> None:
        for start in range(first, first + number, 1_000):
            batch = (f"{entry} {'x' * 500}" for entry in range(start, min(start + 1_000, first + number)))
            await celery.call("LPUSH", key, *batch)

    try:
        assert await age(0.0) == 0.0
        await push(0, 40_000)
        assert [await age(now) for now in (10.0, 15.0)] == [0.0, 5.0]
        for number in range(MAX_MARKS):  # more marks than are kept
            await push(40_000 + number, 1)
            assert await age(20.0 + 5 * number) == 10.0 + 5 * number
        await celery.call("RPOP", key, 40_000)  # those before the first look, and none of the others
        last = 20.0 + 5 * (MAX_MARKS - 1)
        assert last - 30.0 <= await age(last) <= last - 15.0
        await celery.call("RPOP", key, MAX_MARKS - 1)
        assert await age(last + 1.0) == 1.0
        await celery.call("LPUSH", key, "y" * (MAX_MARK_BYTES + 1))
        assert await age(last + 60.0) == 60.0
        await celery.call("DEL", key)
        assert await age(last + 61.0) == 0.0
        await celery.call("SET", key, "of another type")
        assert await waits.oldest_seconds(celery, key, 1.0, last + 62.0) == 0.0
    finally:
        await celery.aclose()
