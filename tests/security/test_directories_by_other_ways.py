"""Directories and sources by every way in but -w: Celery task, inbox, file of tasks, schedule, archive, copies, the
log.

Each way gets the same table: our directories, the system's, a neighbour's, links, names that are swapped meanwhile. In
each opened workspace an agent prints its files and writes one. One cluster serves them all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from broker.contract.codec import pack
from broker.contract.events import AgentSpec, ConversationCreated, LLMSpec, WorkspaceSpec
from broker.contract.specs import Tenancy
from broker.runtime.errors import DeckhandsError
from deckhands.client.client import Client
from deckhands.client.task_files.submission import submit
from deckhands.client.task_files.task_file import open_task_file as opened_tasks
from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.context import derive_task_conversation_id
from deckhands.operations.jobs.scheduler import start_due
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from tests.archive_parts import retired
from tests.faults.harness import FaultCluster
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, all_present
from tests.polling import unhurried, until
from tests.security.directory_world import CANARY, World, world
from tests.security.test_swapped_names import flipping
from tests.unit.deckhands.sample_log import state, user

WRITTEN = "written-from-inside"
LOOK = f"cat file secret.key password journal etc/shadow 2>/dev/null; ls -a; touch {WRITTEN}; true"
GOOD = "roots/good"
RACED = "roots/swapped"
RACES = 6
PART = 5
DIRECTORIES = (
    *("/", "/etc", "/root", "/proc/self/root", "//", "/dev/shm", "home", "home/cluster/valkey", "node", "outside"),
    *("node/neighbour/workspace", "checkpoints", "roots/link", "roots/chain", "roots/relative-link", "roots/to-root"),
    *("roots/to-root/etc", "roots/to-node", "roots/to-neighbour", "roots/through-proc", "roots/good/link"),
    *("roots/../home", "roots/good/../../home", "roots/loop", "roots/fifo", "roots/file", "roots/taken"),
    *("roots/taken/inner", "roots/new\nline", "roots/good\0/../../home", "roots-beside", "roots/bytes-\udcff"),
)
WAYS = ("ingress", "inbox", "file", "log")
COPIED = (
    *("link", "link/secret.key", "to-root/etc/shadow", "to-neighbour", "to-neighbour/file", "../../home/secret.key"),
    *("{top}/home/secret.key", "inner/../../../home", "to-node", "..", "/", ".", "link/cluster/../secret.key"),
)
SOURCES = ("git+file://{top}/home", "git+file:///etc", "git+http://127.0.0.1:1/x", "git+http://[::ffff:7f00:1]/x")


class Ways:
    """A cluster on the machine of `directory_world`, and the ways in; each returns a conversation or None: refused."""

    def __init__(self, cluster: FaultCluster, made: World) -> None:
        self.cluster, self.made, self.client, self.root = cluster, made, cluster.client, cluster.root
        self.producer = Producer(cluster)
        self.names = cluster.client.store.all_shards[0]
        self.book = ScheduleRepository(cluster.client.store, cluster.client.secrets)
        self.model = f"scripted/{cluster.root / 'look.json'}"
        self.number = 0
        self.opened = ""
        look = {"tool_calls": [{"name": "execute_bash", "arguments": {"command": LOOK}}]}
        end = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
        (cluster.root / "look.json").write_text(json.dumps({"turns": [look, end]}))

    async def start(self) -> None:
        environment = {name: text for name, text in self.made.environment.items() if name != "DECKHANDS_URL"}
        environment["DECKHANDS_SANDBOX"] = "bwrap"
        self.cluster.start_controller()
        self.cluster.start_tool(**environment)
        self.cluster.start_ingress()
        await all_present(self.cluster)
        (self.made.roots / "taken" / "inner").mkdir(parents=True)
        (self.made.roots / "taken" / "file").write_text(CANARY)
        first = await self.by_log(str(self.made.roots / "taken"), tenant="acme")
        assert first is not None
        await self.cluster.settle([first])
        assert (await self.client.row(first)).state == "finished"

    def request(self, workspace: str) -> dict[str, Any]:
        self.number += 1
        return {"model": self.model, "workspace": workspace}

    async def by_ingress(self, workspace: str) -> str | None:
        result = self.producer.send("run", "look", kwargs=self.request(workspace))
        await until(result.ready, limit=unhurried(60.0), what="the result of a task")
        return await self.begun(derive_task_conversation_id(result.id))

    async def by_inbox(self, workspace: str) -> str | None:
        request, store = self.request(workspace), self.client.store
        name = f"look-{self.number}"
        await put(store, {"id": name, "task": "look", **request}, reply_to=name)

        async def is_over() -> bool:
            return any(reply.event in ("settled", "rejected") for reply in await replies(store, name))

        await until(is_over, limit=unhurried(60.0), what="the answer to an entry")
        return next((reply.conversation_id for reply in await replies(store, name) if reply.conversation_id), None)

    async def by_file(self, workspace: str) -> str | None:
        request, found = self.request(workspace), list[str]()
        path = self.cluster.root / f"tasks-{self.number}.jsonl"
        path.write_text(json.dumps({"id": "1", "task": "look", **request}))
        with (
            suppress(DeckhandsError),
            opened_tasks(
                str(path), lambda: path.open("rb"), form=None, batch=None, complete=lambda fields: fields
            ) as tasks,
        ):
            tasks.check()
            await submit(self.client, tasks, lambda line, _: found.append(line.conversation_id))
        return found[0] if found else None

    async def by_schedules(self, workspaces: Sequence[str]) -> list[str | None]:
        """As schedules that all come due at one moment."""
        now = await self.book.now()
        due, names = now.replace(second=0, microsecond=0), list[str]()
        for workspace in workspaces:
            request = self.request(workspace)
            names.append(f"look-{self.number}")
            with suppress(DeckhandsError):
                wanted = TaskSpec.parse({"task": "look", **request})
                await self.book.add(Schedule(name=names[-1], cron="* * * * *"), wanted)
                score = int(due.timestamp() * 1000)
                await self.client.store.connection.call("ZADD", self.names.schedules_due, score, names[-1])
        await start_due(self.client, self.book, now)
        begun = {entry.schedule.name: entry.status.conversation_id for entry in await self.book.all()}
        return [begun.get(name) or None for name in names]

    async def by_log(self, workspace: str, tenant: str = "") -> str | None:
        """As a client does that checks nothing."""
        name = await self.create("by-log", workspace, tenant)
        if name is not None:
            await self.client.send_message(name, "look")
        return name

    async def by_archive(self, workspaces: Sequence[str]) -> list[str | None]:
        """As conversations that have ended, were archived, and continue after a message."""
        names, place = (
            [await self.create("by-archive", text, is_over=True) for text in workspaces],
            self.root / "archive",
        )
        assert (await retired(self.client.store, place, self.root))["archived"] >= len(names) - names.count(None)
        self.cluster.forged.update(name for name in names if name is not None)
        continuing = Client(self.client.store, str(place))
        for name in names:
            if name is not None:
                await continuing.restore(name)
                await continuing.send_message(name, "look")
        return names

    async def create(self, way: str, workspace: str, tenant: str = "", *, is_over: bool = False) -> str | None:
        self.number += 1
        name, is_source = f"{way}-{self.number}", workspace.startswith("git+")
        try:
            spec = TaskSpec.parse({"task": "look", "workspace": workspace}).workspace_spec() if is_source else None
            created = ConversationCreated(
                conversation_id=name,
                agent=AgentSpec(llm=LLMSpec(model=self.model)),
                workspace=spec or WorkspaceSpec(path=workspace),
                tenancy=Tenancy(tenant=tenant),
            )
            if is_over:
                await self.client.log.create_from(created, [user("x"), state("running"), state("finished")], key=name)
            else:
                await self.client.log.create(created, [], key=name)
        except (DeckhandsError, ValueError):
            return None
        return name

    async def copied(self, path: str, top: Path) -> str:
        """Return the files that `cp` brings out of a workspace full of links, or puts out of it."""
        if not self.opened:
            self.opened = str(await self.by_log(f"{top}/{GOOD}"))
            await self.cluster.settle([self.opened])
        self.number += 1
        taken, own = self.root / f"copied-{self.number}", self.root / WRITTEN
        own.write_text("x")
        with suppress(DeckhandsError, ValueError):
            await self.client.files.download(self.opened, path, taken)
        with suppress(DeckhandsError, ValueError):
            await self.client.files.upload(self.opened, own, f"{path}/")
        files = [taken, *taken.rglob("*")] if taken.exists() else []
        plain = [file for file in files if file.is_file() and not file.is_symlink()]
        return "read what is not its own" if any(CANARY in file.read_text() for file in plain) else "refused"

    def by(self, way: str) -> Callable[[str], Awaitable[str | None]]:
        """Return one of the other ways."""
        found: Callable[[str], Awaitable[str | None]] = getattr(self, f"by_{way}")
        return found

    async def begun(self, name: str) -> str | None:
        return (
            name if await self.client.store.connection.call("EXISTS", self.client.store.known_keys(name).meta) else None
        )

    async def outcome(self, found: str | None) -> str:
        """Return the outcome of an agent's conversation."""
        if found is None:
            return "refused"
        await self.cluster.settle([found])
        texts = b"".join(pack(event.wire()) for event in (await self.client.events(found))[1:])
        if CANARY.encode() in texts or b"root:" in texts:
            return "read what is not its own"
        ran = b"observation.run" in texts and b"inner" in texts
        return "worked" if ran else "refused"


@pytest.fixture(scope="module", params=[PART, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def way_outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], str]:
    """Return the outcome of every directory and source, or of a part of them, by every way."""
    directories, sources = DIRECTORIES[:: request.param], SOURCES[:: request.param]
    races = RACES // request.param

    async def every() -> dict[tuple[str, str], str]:
        found: dict[tuple[str, str], str] = {}
        with world() as made:
            async with FaultCluster(tmp_path_factory.mktemp("ways")).running() as cluster:
                ways = Ways(cluster, made)
                await ways.start()
                tops = {name: name if name[0] == "/" else f"{made.top}/{name}" for name in (GOOD, *directories)}
                tops |= {source: source.format(top=made.top) for source in sources}
                free = asyncio.Semaphore(24)

                async def ask(way: str, name: str, text: str) -> None:
                    async with free:
                        found[way, name] = await ways.outcome(await ways.by(way)(text))

                await asyncio.gather(*(ask(way, name, text) for way in WAYS for name, text in tops.items()))
                (made.roots / "swapped").mkdir()
                with flipping(made.roots / "swapped", made.roots / "to-neighbour"):
                    for way in WAYS:
                        for number in range(races):
                            raced = await ways.by(way)(f"{made.top}/{RACED}")
                            found[way, f"race {number}"] = await ways.outcome(raced)
                    asked = [*tops, *(f"race {number}" for number in range(races))]
                    texts = [*tops.values(), *[f"{made.top}/{RACED}"] * races]
                    for way, some in (("schedule", ways.by_schedules), ("archive", ways.by_archive)):
                        for name, cid in zip(asked, await some(texts), strict=True):
                            found[way, name] = await ways.outcome(cid)
                for path in COPIED[:: request.param]:
                    found["cp", path] = await ways.copied(path.format(top=made.top), made.top)
                ways.producer.close()
            allowed = {made.roots / "good", made.roots / "taken", made.roots / "swapped", made.roots / "to-neighbour"}
            stray = [str(path) for path in made.top.rglob(WRITTEN) if not allowed & {*path.parents}]
            found["any", "stray files"] = ", ".join(stray) or "refused"
            found["any", "the neighbour"] = (
                "written" if (made.neighbour / "workspace" / WRITTEN).exists() else "refused"
            )
        return found

    return asyncio.run(every())


def test_every_way_leads_to_what_is_offered_alone(way_outcomes: dict[tuple[str, str], str]) -> None:
    """One test: what it looks at takes a cluster for some seconds, in each test process that asks."""
    races = {asked: came for asked, came in way_outcomes.items() if asked[1].startswith("race")}
    through = {
        asked: came
        for asked, came in way_outcomes.items()
        if came != "refused" and asked[1] != GOOD and asked not in races
    }
    assert through == {}
    assert len(way_outcomes) >= (len(WAYS) + 2) * len(DIRECTORIES) // PART
    assert {*races.values()} <= {"worked", "refused"}
    every = (*WAYS, "schedule", "archive")
    assert {way: way_outcomes[way, GOOD] for way in every} == dict.fromkeys(every, "worked")
