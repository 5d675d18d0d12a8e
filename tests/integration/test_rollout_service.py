"""Rollout runs over HTTP: a trainer with an API key, a server with its rights, and drivers of the operator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.runtime import DeckhandsError, UsageError
from broker.runtime.child import ChildProcess
from deckhands.client import ServerCalls
from deckhands.rollouts import (
    Group,
    RemoteRolloutRun,
    RolloutRun,
    RolloutSpec,
    StubEngine,
    describe_runs,
    drive_all,
    serve_stub,
)
from deckhands.rollouts.driver import drive
from tests.polling import until
from tests.rollout_parts import make_environment, make_prompts
from tests.server_parts import Served, served_with_workers

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Service:
    """A server whose cluster has an engine and a driver of every run."""

    def __init__(self, server: Served, engine: StubEngine, folder: Path) -> None:
        self.server, self.engine = server, engine
        self._folder, self._drivers = folder, 0

    async def start(self, tenant: str = "acme", prompts: int = 2, **fields: Any) -> RemoteRolloutRun:
        spec = RolloutSpec.parse({"prompts": make_prompts(prompts), "model": "openai/stub", "group_size": 2, **fields})
        return await RemoteRolloutRun.start(self.server.url, await self.server.token(tenant), spec)

    def start_driver(self) -> ChildProcess:
        self._drivers += 1
        environment = self.server.environment(self._folder / "driver")
        command = [sys.executable, "-m", "deckhands", "rollouts", "attach"]
        return ChildProcess.start(command, log=self._folder / f"driver-{self._drivers}.log", env=environment)

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        driver = self.start_driver()
        try:
            yield
        finally:
            await driver.stop(grace_seconds=10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    engine, folder = StubEngine(turns=1, tool="think"), tmp_path_factory.mktemp("service")
    async with serve_stub(engine) as address, served_with_workers(folder, **make_environment(address)) as server:
        yield Service(server, engine, folder)


async def read_all(run: RemoteRolloutRun) -> list[Group]:
    found = []
    async for group in run.groups():
        found.append(group)
        await group.ack()
    return found


async def test_groups_arrive_over_http_with_their_tokens(service: Service) -> None:
    async with service.driven(), await service.start() as run:
        groups = await read_all(run)
        assert sorted(group.instance for group in groups) == ["prompt-0", "prompt-1"]
        rows = [(row["prompt"], row["tokens"]) for row in service.engine.truth]
        for rollout in (one for group in groups for one in group.rollouts):
            (segment,) = rollout.trajectory.segments
            tokens = segment.tokens.tolist()
            assert len(segment.replies) == 2
            assert all((tokens[: one.start], tokens[one.start : one.end]) in rows for one in segment.replies)
            assert sum(segment.mask) == sum(one.end - one.start for one in segment.replies)
        about = await run.describe()
        assert (about["state"], about["tenant"], about["groups"], about["waiting"]) == ("over", "acme", 2, 0)


async def test_a_reader_that_died_continues_at_its_ack(service: Service) -> None:
    async with service.driven(), await service.start(prompts=3) as run:
        reading = run.groups()
        first = await anext(reading)
        await first.ack()
        second = await anext(reading)
        await reading.aclose()
        rest = await read_all(run)
        assert rest[0].id == second.id
        assert {first.id, *(group.id for group in rest)} == {f"prompt-{n}-r0" for n in range(3)}


async def test_a_killed_driver_is_replaced(service: Service) -> None:
    killed = service.start_driver()
    async with await service.start(prompts=2) as run:

        async def is_driven() -> bool:
            return bool((await run.describe())["is_driven"])

        await until(is_driven, what="driver", limit=60)
        os.kill(killed.pid, signal.SIGKILL)
        await killed.wait()
        async with service.driven():
            assert len(await read_all(run)) == 2


async def test_a_run_that_cannot_be_driven_stops_no_other(service: Service, tmp_path: Path) -> None:
    (tmp_path / "no directory").touch()
    failed = []
    async with await service.start() as bad, await service.start() as good:

        def find_place(name: str) -> Path:
            return tmp_path / ("no directory" if name == bad.name else name)

        driving = asyncio.create_task(
            drive_all(service.server.client, find_place, lambda name, error: failed.append((name, type(error))))
        )
        assert len(await read_all(good)) == 2

        async def is_told() -> bool:
            return {"not_driven"} <= {one["kind"] for one in (await bad.describe())["events"]}

        await until(is_told, what="event", limit=60)
        assert failed == [(bad.name, FileExistsError)]
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        await bad.abort()


async def test_old_groups_are_tried_again_over_http(service: Service) -> None:
    async with service.driven(), await service.start(prompts=1, max_staleness=0) as run:

        async def is_delivered() -> bool:
            return bool((await run.describe())["waiting"])

        await until(is_delivered, what="group", limit=60)
        async with service.engine.policy.changed:
            service.engine.policy.version = 1
        await run.weights_changed(1)
        (group,) = await read_all(run)
        assert (group.round, group.min_version, group.rollouts[0].min_version) == (1, 1, 1)
        with pytest.raises(UsageError, match="version 1 already"):
            await run.weights_changed(0)


async def test_a_paused_run_starts_nothing_until_resumed(service: Service) -> None:
    async with await service.start(prompts=1) as run:
        await run.pause("new weights")
        async with service.driven():

            async def is_driven() -> bool:
                return bool((await run.describe())["is_driven"])

            await until(is_driven, what="driver", limit=60)
            async with await service.start(prompts=1) as other:
                assert len(await read_all(other)) == 1
            about = await run.describe()
            assert (about["state"], about["groups"]) == ("paused", 0)
            rows = await service.server.client.recent()
            labels = {row.labels.get("evaluation") for row in rows}
            assert other.name in labels
            assert run.name not in labels
            (paused,) = [one for one in about["events"] if one["kind"] == "paused"]
            assert paused["reason"] == "new weights"
            assert paused["by"].startswith("key ")
            await run.resume()
            assert len(await read_all(run)) == 1


async def test_an_aborted_run_delivers_nothing(service: Service) -> None:
    async with await service.start() as run:
        await run.abort()
        assert await read_all(run) == []


async def test_runs_of_other_tenants_appear_not_to_exist(service: Service) -> None:
    async with await service.start("acme") as run, service.server.as_(await service.server.token("globex")) as other:
        for path in ("", "/groups", "/groups/1/ack", "/weights", "/abort"):
            body = {"weights": {"version": 1}, "abort": {"reason": "x"}}.get(path[1:], {})
            answer = await (
                other.post(f"/rollouts/{run.name}{path}", json=body) if path else other.get(f"/rollouts/{run.name}")
            )
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_rollout_run")
        assert run.name not in {one["name"] for one in (await other.get("/rollouts")).json()}
        async with service.server.as_(await service.server.token("acme")) as own:
            assert run.name in {one["name"] for one in (await own.get("/rollouts")).json()}
        await run.abort()


async def test_a_key_starts_runs_of_its_tenant_only(service: Service) -> None:
    body = {"prompts": make_prompts(1), "model": "openai/stub", "tenant": "globex"}
    async with service.server.as_(await service.server.token("acme")) as client:
        answer = await client.post("/rollouts", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "usage")


async def test_a_repeated_start_is_one_run(service: Service) -> None:
    body, key = {"prompts": make_prompts(1), "model": "openai/stub"}, {"Idempotency-Key": "once"}
    async with service.server.as_(await service.server.token("acme")) as client:
        first = (await client.post("/rollouts", json=body, headers=key)).json()
        again = (await client.post("/rollouts", json=body, headers=key)).json()
        assert first["name"] == again["name"]
        await client.post(f"/rollouts/{first['name']}/abort", json={"reason": "over"})


ROW = make_prompts(1)[0]
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompts": [{**ROW, "workspace": "/etc"}]}, "names a directory"),
    ({"prompts": [{**ROW, "hidden": "/etc"}]}, "names a directory"),
    ({"prompts": [{**ROW, "images": ["/etc/passwd"]}]}, "names a file"),
    ({"prompts": [{"task_id": "1", "Question": "?", "Final answer": "1", "file_name": "a"}]}, "row 1"),
    ({"prompts": [ROW], "weights": {"nothing": 1.0}}, "no part 'nothing'"),
    ({"prompts": [{"id": "one", "task": "do it"}]}, "no check, no tests and no answer"),
    ({"prompts": [ROW], "epochs": 10_000, "group_size": 256}, "more than 1,000,000 trajectories"),
    ({"prompts": [ROW], "model": "openai/unknown"}, "openai/unknown"),
    ({"prompts": [ROW], "critic": "openai/unknown"}, "openai/unknown"),
)


@pytest.mark.parametrize(("fields", "message"), REFUSED)
async def test_what_names_parts_of_the_driver_is_refused(
    service: Service, fields: dict[str, Any], message: str
) -> None:
    async with service.server.as_(await service.server.token()) as client:
        answer = await client.post("/rollouts", json={"model": "openai/stub", **fields})
        assert answer.status_code == 422
        assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    "fields", [{"prompts": "shipped"}, {"scorers": ["os@getcwd"]}, {"engines": ["http://127.0.0.1:1"]}]
)
async def test_a_driver_refuses_forged_specifications(service: Service, fields: dict[str, Any], tmp_path: Path) -> None:
    spec = RolloutSpec.parse({"prompts": [ROW], "model": "openai/stub", **fields})
    name = f"h-forged-{next(iter(fields))}"
    client = service.server.client
    keys = client.store.all_shards[0]
    await client.store.call("HSET", keys.rollout(name), "spec", spec.model_dump_json())
    with pytest.raises(UsageError, match="over HTTP"):
        await drive(client, name, tmp_path)
    with pytest.raises(UsageError, match="over HTTP"):
        await RolloutRun(client, name).pause()


async def test_names_of_servers_are_refused_for_operators(service: Service, tmp_path: Path) -> None:
    spec = RolloutSpec.parse({"prompts": [ROW], "model": "openai/stub"})
    with pytest.raises(UsageError, match="run of a server"):
        await RolloutRun.start(service.server.client, spec, name="h-mine", directory=tmp_path)


async def call(service: Service, tenant: str, *arguments: str) -> tuple[int, str]:
    """Run the command with a server and a key, without a store."""
    environment = {**os.environ, "DECKHANDS_API_KEY": await service.server.token(tenant), "DECKHANDS_URL": ""}
    command = (sys.executable, "-m", "deckhands", "rollouts", "--server", service.server.url, *arguments)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    shown, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, shown.decode()


async def test_commands_act_at_a_server(service: Service, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in make_prompts(2)))
    spec = tmp_path / "spec.toml"
    spec.write_text('model = "openai/stub"\ngroup_size = 2\n')
    code, name = await call(service, "commands", "run", str(rows), "--spec", str(spec))
    assert code == 0, name
    name = name.strip()
    assert name.startswith("h-")
    assert (await call(service, "commands", "pause", name))[0] == 0
    code, listed = await call(service, "commands", "ls", "--json")
    (about,) = json.loads(listed)
    assert (about["name"], about["state"], about["tenant"]) == (name, "paused", "commands")
    assert (await call(service, "commands", "weights", name, "3"))[0] == 0
    assert (await call(service, "commands", "resume", name))[0] == 0
    code, shown = await call(service, "commands", "show", name)
    assert f"{name}: running, version 3" in shown
    assert (await call(service, "commands", "abort", name))[0] == 0
    assert "aborted" in (await call(service, "commands", "show", name))[1]
    code, refused = await call(service, "others", "show", name)
    assert code != 0
    assert "no such run" in refused
    for command in (("attach", name), ("export", name, "--out", str(tmp_path / "out.jsonl"))):
        code, refused = await call(service, "commands", *command)
        assert code != 0
        assert "does not work at a server" in refused
    code, refused = await call(service, "commands", "run", "shipped", "--spec", str(spec))
    assert code != 0
    assert ".jsonl" in refused


async def test_lists_of_runs_have_pages(service: Service) -> None:
    names = []
    for _ in range(3):
        async with await service.start("pages") as run:
            names.insert(0, run.name)
            await run.abort()
    calls = ServerCalls(service.server.url, await service.server.token("pages"))
    try:
        first = await calls.ask("GET", "/rollouts", query={"limit": 2})
        await calls.ask("POST", f"/rollouts/{names[1]}/abort", body={"reason": "it moves to the front"})
        after = {"after": first.headers["Next-After"]}
        rest = await calls.ask("GET", "/rollouts", query={"limit": 2, **after})
        assert [one["name"] for one in first.json() + rest.json()] == names
        assert "Next-After" not in rest.headers
        with pytest.raises(DeckhandsError, match="not a cursor"):
            await calls.ask("GET", "/rollouts", query={"after": "h-of-another"})
        with pytest.raises(DeckhandsError):
            await calls.ask("GET", "/rollouts", query={"limit": 100_000})
    finally:
        await calls.aclose()


async def test_a_list_reads_no_prompts_and_no_groups(service: Service) -> None:
    store = service.server.client.store
    async with await service.start("lists") as run:
        key = store.all_shards[0].rollout(run.name)
        for number in range(1, 4):
            await store.call("XADD", store.all_shards[0].rollout_groups(run.name), f"{number}-0", "group", "{")
        await store.call("HSET", key, "spec", "damaged")
        (about,) = await RemoteRolloutRun.list_all(service.server.url, await service.server.token("lists"))
        assert (about["name"], about["groups"], about["waiting"]) == (run.name, 3, 3)
        await store.call("DEL", key)


async def test_a_list_has_runs_without_recorded_labels(service: Service) -> None:
    store = service.server.client.store
    async with await service.start("labels") as run:
        key = store.all_shards[0].rollout(run.name)
        await store.call("HDEL", key, "tenant", "model")
        (about,) = await RemoteRolloutRun.list_all(service.server.url, await service.server.token("labels"))
        assert (about["name"], about["tenant"], about["model"]) == (run.name, "labels", "openai/stub")
        await run.abort()


async def test_a_list_of_all_runs_has_each_once(service: Service) -> None:
    names = []
    for _ in range(3):
        async with await service.start("all") as run:
            names.insert(0, run.name)
            await run.abort()
    rows = await RemoteRolloutRun.list_all(service.server.url, await service.server.token("all"), page_size=1)
    assert [one["name"] for one in rows] == names


async def test_runs_of_one_moment_are_listed_once(service: Service) -> None:
    store = service.server.client.store
    keys = store.all_shards[0]
    names = {f"moment-{n:04}" for n in range(1_203)}
    spec = RolloutSpec.parse({"prompts": make_prompts(1), "model": "openai/stub", "tenant": "moments"})
    commands = [("HSET", keys.rollout(name), "spec", spec.model_dump_json()) for name in names]
    await store.call_many([*commands, *(("ZADD", keys.rollouts, 1_000, name) for name in names)])
    listed, after = [], ""
    while after or not listed:
        rows, after = await describe_runs(store, tenant="moments", limit=700, after=after)
        listed += [one["name"] for one in rows]
    assert listed == sorted(names, reverse=True)
    await store.call_many([("DEL", keys.rollout(name)) for name in names])
    await store.call("ZREM", keys.rollouts, *names)
