"""Schedules in a store: each tick starts one conversation, however often it is handled, by the overlap policy."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.log.conversations import ConversationRow, Conversations
from broker.log.event_log import EventLog
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from broker.store.store import Store
from controller_worker.agents.registry import list_agents
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.scheduler import (
    derive_tick_conversation_id,
    has_due_schedules,
    start_due,
    start_due_schedules,
)
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule, ScheduleStatus

NAME = "nightly"
NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)


class Cluster:
    """A store with a member that knows agents, and the ticks of its schedules."""

    def __init__(self, store: Store) -> None:
        self.store, self.now = store, NOON
        self.services = JobServices(store, BrokerSettings.from_env())
        self.book = ScheduleRepository(store, self.services.client.secrets)

    async def add(self, request: dict[str, Any] | None = None, **fields: Any) -> None:
        schedule = Schedule(**{"name": NAME, "cron": "0 6 1 1 *"} | fields)
        await self.book.add(schedule, TaskSpec.parse({"task": "look", **(request or {})}))

    async def add_of_agent(self, agent: str, **fields: Any) -> None:
        """Add the schedule while a worker knows an agent, which no worker does later."""
        await self.replace_controllers(agent)
        await self.add({"agent": agent}, **fields)
        await self.replace_controllers(*list_agents())

    async def come_due(self, moment: datetime | None = None, *, name: str = NAME) -> datetime:
        """Let the schedule's next tick be at a moment, and another one each minute."""
        moment = moment or self.now
        text = (await self.book.entry(name)).schedule.model_copy(update={"cron": "* * * * *"}).model_dump_json()
        names = self.store.all_shards[0]
        await self.store.connection.call("HSET", names.schedules, name, text)
        await self.store.connection.call("ZADD", names.schedules_due, int(moment.timestamp() * 1000), name)
        return moment

    async def tick(self, *, minutes_later: float = 0.0) -> None:
        self.now += timedelta(minutes=minutes_later)
        await start_due(self.services.client, self.book, self.now)

    async def first_tick(self, request: dict[str, Any] | None = None, **fields: Any) -> datetime:
        """Add the schedule and let its first tick pass."""
        await self.add(request, **fields)
        due = await self.come_due()
        await self.tick()
        return due

    async def rows(self) -> list[ConversationRow]:
        return await Conversations(self.store).list_recent()

    async def standing(self, name: str = NAME) -> ScheduleStatus:
        return (await self.book.entry(name)).status

    async def replace_controllers(self, *agents: str) -> None:
        await self.store.connection.call("DEL", self.store.all_shards[0].workers)
        about = {"agents": ",".join(agents)}
        await Membership(self.store, agents[0], "controller", about=about, ttl_seconds=3600.0).register()

    async def settle(self, conversation_id: str) -> None:
        meta = self.store.known_keys(conversation_id).meta
        await self.store.connection.call("HSET", meta, "state", "finished")


@pytest.fixture
async def cluster(valkey_store: Store) -> Cluster:
    about = {"agents": ",".join(list_agents()), "plugins": "deckhands.confirmation_policies:ours"}
    await Membership(valkey_store, "c1", "controller", about=about, ttl_seconds=3600.0).register()
    return Cluster(valkey_store)


async def test_a_tick_begins_one_conversation_with_all_its_options(cluster: Cluster) -> None:
    request = {"labels": {"team": "docs"}, "tenant": "acme", "double_texting": "reject"}
    await cluster.add(request | {"limits": {"max_iterations": 7}})
    await cluster.tick()
    assert await cluster.rows() == []
    due = await cluster.come_due()
    await cluster.tick()
    (row,) = await cluster.rows()
    assert row.conversation_id == derive_tick_conversation_id(NAME, due)
    assert row.labels == {"team": "docs", "schedule": NAME}
    created: Any = (await cluster.services.client.events(row.conversation_id))[0]
    assert (created.tenancy.tenant, created.limits.max_iterations, created.double_texting) == ("acme", 7, "reject")
    standing = await cluster.standing()
    assert (standing.last_tick, standing.begun, standing.error) == (due, 1, "")
    assert (await cluster.book.entry(NAME)).due == due + timedelta(minutes=1)


async def test_store_says_whether_a_schedule_has_work(cluster: Cluster) -> None:
    assert not await has_due_schedules(cluster.services)
    await cluster.add()
    assert not await has_due_schedules(cluster.services)
    await cluster.come_due(cluster.store.clock.now())
    assert await has_due_schedules(cluster.services)
    entry = await cluster.book.entry(NAME)
    await cluster.book.move(entry, entry.status.model_copy(update={"queued": (cluster.now,)}), None)
    assert await has_due_schedules(cluster.services)


async def test_ticks_that_race_begin_one_conversation(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    await asyncio.gather(*(cluster.tick() for _ in range(8)))
    assert len(await cluster.rows()) == 1
    assert (await cluster.standing()).begun == 1


async def test_a_repeated_tick_begins_nothing(cluster: Cluster) -> None:
    due = await cluster.first_tick()
    names = cluster.store.all_shards[0]
    await cluster.store.connection.call("ZADD", names.schedules_due, int(due.timestamp() * 1000), NAME)
    await cluster.tick()
    assert len(await cluster.rows()) == 1


async def test_tick_of_a_worker_dying_after_its_start_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.add()
    due = await cluster.come_due()
    client, book = cluster.services.client, cluster.book
    entry = await book.entry(NAME)
    await client.submit(book.load_request(entry.schedule), conversation_id=derive_tick_conversation_id(NAME, due))
    await cluster.tick(minutes_later=1)  # it is noted, and the next tick has come meanwhile
    assert (await cluster.standing()).last_tick == due
    await cluster.tick()
    standing = await cluster.standing()
    assert (standing.begun, standing.skipped, standing.missed) == (1, 1, 0)
    assert len(await cluster.rows()) == 1


async def test_overlapping_tick_is_skipped_by_default(cluster: Cluster) -> None:
    await cluster.first_tick()
    begun = (await cluster.standing()).conversation_id
    await cluster.tick(minutes_later=1)
    standing = await cluster.standing()
    assert (standing.skipped, standing.conversation_id) == (1, begun)
    await cluster.settle(begun)
    await cluster.tick(minutes_later=1)
    standing = await cluster.standing()
    assert (standing.begun, standing.skipped, standing.missed) == (2, 1, 0)
    assert len(await cluster.rows()) == 2


async def test_ticks_wait_for_their_turn(cluster: Cluster) -> None:
    await cluster.first_tick(overlap="enqueue")
    for _ in range(2):
        await cluster.tick(minutes_later=1)
    standing = await cluster.standing()
    assert standing.queued == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=2))
    assert len(await cluster.rows()) == 1
    for left in (1, 0):
        await cluster.settle(standing.conversation_id)
        await cluster.tick()
        standing = await cluster.standing()
        assert len(standing.queued) == left
    # As a set: two that started within a millisecond are listed in the order of their ids.
    assert {row.conversation_id for row in await cluster.rows()} == {
        derive_tick_conversation_id(NAME, NOON + timedelta(minutes=minutes)) for minutes in range(3)
    }


async def test_blocked_tick_in_line_does_not_block_later_ones_forever(cluster: Cluster) -> None:
    await cluster.first_tick({"agent": "BrowsingAgent"}, overlap="enqueue")
    begun = (await cluster.standing()).conversation_id
    for _ in range(2):
        await cluster.tick(minutes_later=1)
    names = cluster.store.all_shards[0]
    await cluster.replace_controllers("AnotherAgent")
    await cluster.store.connection.call("ZREM", names.schedules_due, NAME)
    await cluster.settle(begun)
    await cluster.tick(minutes_later=50)
    standing = await cluster.standing()
    assert (len(standing.queued), standing.missed) == (2, 0)  # it has not been tried for long
    assert standing.error
    await cluster.tick(minutes_later=61)
    standing = await cluster.standing()
    assert (len(standing.queued), standing.missed) == (1, 1)
    await cluster.replace_controllers(*list_agents())
    await cluster.tick()
    standing = await cluster.standing()
    assert (standing.last_tick, standing.error) == (NOON + timedelta(minutes=2), "")


async def test_tick_behind_a_blocked_one_lines_up(cluster: Cluster) -> None:
    await cluster.first_tick({"agent": "BrowsingAgent"}, overlap="enqueue")
    begun = (await cluster.standing()).conversation_id
    await cluster.tick(minutes_later=1)
    await cluster.replace_controllers("AnotherAgent")
    await cluster.settle(begun)
    for _ in range(2):
        await cluster.tick(minutes_later=1)
    assert (await cluster.standing()).queued == tuple(NOON + timedelta(minutes=minutes) for minutes in (1, 2, 3))


async def test_schedule_written_by_another_version_moves_on(cluster: Cluster) -> None:
    await cluster.add()
    due = await cluster.come_due()
    text = '{"begun": 3, "a_field_of_another_version": 1}'
    await cluster.store.connection.call("HSET", cluster.store.all_shards[0].schedules_status, NAME, text)
    await cluster.tick()
    assert ((await cluster.standing()).begun, (await cluster.standing()).last_tick) == (4, due)


class Interrupted(ScheduleRepository):
    """A book in which something happens when it looks at the time, between its reads and writes."""

    happens: Any = None

    async def now(self) -> datetime:
        await self.happens()
        return await super().now()


async def test_schedule_removed_while_it_is_resumed_stays_removed(cluster: Cluster) -> None:
    await cluster.add(is_paused=True)
    book = Interrupted(cluster.store, cluster.services.client.secrets)
    book.happens = lambda: cluster.book.remove(NAME)
    with pytest.raises(UsageError, match="There is no schedule nightly"):
        await book.set_paused(NAME, is_paused=False)
    assert await cluster.book.all() == []
    book.happens = None  # which cannot be called: as if the process had died before the schedule is whole
    with pytest.raises(TypeError):
        await book.add(Schedule(name=NAME, cron="0 6 1 1 *"), TaskSpec.parse({"task": "look"}))
    assert await cluster.book.all() == []
    await cluster.add()
    assert (await cluster.book.entry(NAME)).due is not None


async def test_one_that_cannot_be_read_can_be_removed(cluster: Cluster) -> None:
    names = cluster.store.all_shards[0]
    await cluster.store.connection.call("HSET", names.schedules, NAME, "{")
    await cluster.book.remove(NAME)
    assert await cluster.store.connection.call("EXISTS", names.schedules) == 0


async def test_a_tick_may_cancel_the_one_before(cluster: Cluster) -> None:
    await cluster.first_tick(overlap="cancel")
    begun = (await cluster.standing()).conversation_id
    await cluster.tick(minutes_later=1)
    assert len(await cluster.rows()) == 2
    requested = [getattr(event, "agent_state", None) for event in await cluster.services.client.events(begun)]
    assert requested[-1] == "stopped"


async def test_latest_missed_tick_is_made_up_after_a_beat_outage(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    await cluster.tick(minutes_later=30.5)
    standing = await cluster.standing()
    assert (standing.last_tick, standing.missed) == (NOON + timedelta(minutes=30), 30)
    assert len(await cluster.rows()) == 1


async def test_a_paused_schedule_begins_nothing_and_makes_up_for_nothing(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    assert await cluster.book.set_paused(NAME, is_paused=True) is None
    await cluster.tick(minutes_later=1)
    assert await cluster.rows() == []
    due = await cluster.book.set_paused(NAME, is_paused=False)
    assert due is not None
    assert due > await cluster.book.now()
    await cluster.tick()
    assert await cluster.rows() == []


async def test_the_job_goes_by_the_time_of_the_store(cluster: Cluster) -> None:
    await cluster.add(catch_up_seconds=1e8)
    due = await cluster.come_due()
    assert await start_due_schedules(cluster.services) == {"looked_at": 1}
    last = (await cluster.standing()).last_tick
    assert due < last <= await cluster.book.now() < last + timedelta(minutes=2)


async def test_schedule_paused_during_a_tick_stays_paused(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    entry = await cluster.book.entry(NAME)
    await cluster.book.set_paused(NAME, is_paused=True)
    assert await cluster.book.move(entry, ScheduleStatus(begun=1), datetime.now(UTC) + timedelta(hours=1))
    assert (await cluster.book.entry(NAME)).due is None
    await cluster.book.remove(NAME)
    assert not await cluster.book.move(entry, ScheduleStatus(begun=2), None)
    with pytest.raises(UsageError, match="There is no schedule nightly"):
        await cluster.book.entry(NAME)


async def test_blocked_schedule_names_its_reason_and_delays_no_other(cluster: Cluster) -> None:
    await cluster.add_of_agent("NobodyAgent", name="spoilt")
    await cluster.add()
    due = await cluster.come_due(name="spoilt")
    await cluster.come_due()
    for _ in range(2):
        await cluster.tick()
    assert len(await cluster.rows()) == 1
    entry = await cluster.book.entry("spoilt")
    assert "NobodyAgent" in entry.status.error
    assert entry.due == due  # it is tried again


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"agent": {"confirmation": {"mode": "riskey"}}}, "There is no confirmation policy named 'riskey'"),
        (
            {"agent": {"confirmation": {"mode": "risky", "analyzer": "ours"}}},
            "There is no risk analyzer named 'ours'",
        ),
        ({"agent": "NobodyAgent"}, "There is no agent named 'NobodyAgent'"),
        ({"tools": ["weather"]}, "weather"),
        (
            {"workspace": {"source": {"kind": "upload", "name": "a.tar", "format": "tar", "parcel": "0" * 64}}},
            "an uploaded file",
        ),
        ({"expires": "2150-01-01T00:00:00Z"}, "The expires of a schedule cannot be a time of day"),
        ({"not_before": "2150-01-01T00:00:00Z"}, "The not_before of a schedule"),
        ({"idempotency_key": "k"}, "each tick is a new conversation"),
        ({"labels": {"schedule": "other"}}, "The label schedule is the name of the schedule"),
    ],
)
async def test_task_that_no_tick_could_start_is_refused_at_once(
    cluster: Cluster, request_: dict[str, Any], said: str
) -> None:
    schedule, request = Schedule(name=NAME, cron="0 6 1 1 *"), TaskSpec.parse({"task": "look", **request_})
    with pytest.raises(UsageError) as refused:
        await cluster.book.add(schedule, request, offers_limit_seconds=0.0)
    assert said in refused.value.message
    assert await cluster.book.all() == []


async def test_unreadable_schedule_is_quarantined(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.come_due()
    names = cluster.store.all_shards[0]
    await cluster.store.connection.call("HSET", names.schedules, "forged", "{")
    await cluster.store.connection.call("ZADD", names.schedules_due, 1, "forged")
    await cluster.tick()
    assert len(await cluster.rows()) == 1
    assert [entry.schedule.name for entry in await cluster.book.all()] == [NAME]
    assert await cluster.store.connection.call("ZSCORE", names.schedules_due, "forged") is None


async def test_secrets_are_not_readable_in_the_store(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))
    await cluster.add({"task": "use hunter2-hunter2", "secrets": {"TOKEN": "hunter2-hunter2"}})
    text = await cluster.store.connection.call("HGET", cluster.store.all_shards[0].schedules, NAME)
    assert b"hunter2" not in text
    await cluster.come_due()
    await cluster.tick()
    (row,) = await cluster.rows()
    log = EventLog(cluster.store)
    assert "hunter2" not in str(await log.read(row.conversation_id))
    assert await cluster.services.client.secrets.list_names(row.conversation_id) == ["TOKEN"]


async def test_a_name_means_one_schedule(cluster: Cluster) -> None:
    await cluster.add()
    await cluster.add()  # the same again, as after a lost reply
    with pytest.raises(UsageError, match="There is a schedule nightly already"):
        await cluster.add({"task": "another"})
