"""Two tenants on one node: a directory that the one works in is not for the other, nor one in it or around it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, Observation, Parent, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.contract.specs import Tenancy
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.workspace_hosts import opened
from tests.security.directory_world import IS_ROOT, World, world
from tool_worker.errors import WorkspaceRefused
from tool_worker.settings import load_tool_settings
from tool_worker.worker.executor import Executor
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.launch.host_folder import Binding, HostFolder

ANOTHERS = "a conversation of another tenant works in it, in one inside it, or in one around it"


def bound_to(directory: Path, tenant: str | None, **fields: Any) -> Binding:
    return Binding(
        path=str(directory),
        mount_at=str(directory),
        sandbox="bwrap",
        has_network=False,
        host_id="0" * 32,
        tenant=tenant,
    )


@pytest.fixture
def made() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture
def bindings(made: World) -> Bindings:
    return Bindings(made.node, load_tool_settings(made.environment).named)


def bind(bindings: Bindings, made: World, conversation_id: str, directory: Path, tenant: str) -> None:
    folder = HostFolder(made.node, conversation_id)
    folder.create()
    bindings.bind(folder, bound_to(directory, tenant)).close()


@pytest.mark.parametrize("name", ["good/inner", "good/inner/deeper", "good", "."])
def test_directory_its_parent_and_child_are_taken(made: World, bindings: Bindings, name: str) -> None:
    (made.roots / "good" / "inner" / "deeper").mkdir()
    bind(bindings, made, "first", made.roots / "good" / "inner", "acme")
    with pytest.raises(WorkspaceRefused, match=ANOTHERS) as refused:
        bind(bindings, made, "second", made.roots / name, "other")
    assert "acme" not in str(refused.value)
    assert "first" not in str(refused.value)
    assert HostFolder(made.node, "second").read_binding() is None
    with pytest.raises(WorkspaceRefused, match=ANOTHERS):  # the default tenant is another tenant, too
        bind(bindings, made, "third", made.roots / name, "")


def test_conversations_of_one_tenant_share_a_directory(made: World, bindings: Bindings) -> None:
    (made.roots / "good-too").mkdir()
    for number, name in enumerate(("good", "good/inner", ".", "good")):
        bind(bindings, made, f"of-acme-{number}", made.roots / name, "acme")
    with pytest.raises(WorkspaceRefused, match=ANOTHERS):
        bind(bindings, made, "second", made.roots / "good-too", "other")  # `.` is around it
    for folder in made.node.glob("of-acme-*"):
        subprocess.run(["rm", "-r", folder], check=True)
    bind(bindings, made, "second", made.roots / "good-too", "other")
    bind(bindings, made, "third", made.roots / "good", "acme")


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount")
def test_another_name_for_a_directory_that_is_taken_is_taken(made: World, bindings: Bindings) -> None:
    again = made.mounts / "again"
    again.mkdir()
    subprocess.run(["mount", "--bind", made.roots / "good", again], check=True)
    try:
        bind(bindings, made, "first", made.roots / "good", "acme")
        for directory in (again, again / "inner"):
            with pytest.raises(WorkspaceRefused, match=ANOTHERS):
                bind(bindings, made, "second", directory, "other")
    finally:
        subprocess.run(["umount", again], check=True)


async def test_of_many_who_ask_at_once_one_tenant_gets_it(made: World) -> None:
    named = load_tool_settings(made.environment).named
    directory = made.roots / "good"

    def asked(number: int) -> str | None:
        try:
            bind(Bindings(made.node, named), made, f"asker-{number}", directory, f"tenant-{number % 5}")
        except WorkspaceRefused:
            return None
        return f"tenant-{number % 5}"

    got = await asyncio.gather(*(asyncio.to_thread(asked, number) for number in range(40)))
    winners = {tenant for tenant in got if tenant is not None}
    assert len(winners) == 1
    assert sum(tenant is not None for tenant in got) == 8


def test_earlier_binding_gets_its_tenant_on_use(made: World, bindings: Bindings) -> None:
    folder = HostFolder(made.node, "old")
    folder.create()
    folder.write_binding(bound_to(made.roots / "good", None))
    bind(bindings, made, "old", made.roots / "good", "acme")
    with pytest.raises(WorkspaceRefused, match=ANOTHERS):
        bind(bindings, made, "second", made.roots / "good", "other")


class Node:
    """A tool worker's executor on the node, and conversations that name directories."""

    def __init__(self, log: EventLog, executor: Executor) -> None:
        self.log, self.executor = log, executor

    async def run(self, conversation_id: str, command: str, path: Path) -> Observation:
        await self.log.append(conversation_id, [CmdRunAction(command=command)])
        action = (await self.log.read(conversation_id))[-1]
        spec = WorkspaceSpec(path=str(path))
        entry = await self.log.load_entry(conversation_id, action.id)
        delivery = ActionDelivery(conversation_id, action.id, entry, spec, "")
        await self.executor.execute(delivery, ActionClaimed(1))
        answer = (await self.log.read(conversation_id))[-1]
        assert isinstance(answer, Observation)
        return answer


async def test_delegates_and_forks_share_but_other_tenants_do_not(made: World, memory_store: Store) -> None:
    log = EventLog(memory_store)
    good = made.roots / "good"
    acme = Tenancy(tenant="acme")
    parent = Parent(conversation_id="origin", delegate_id=2, level=1)
    for created in (
        ConversationCreated(conversation_id="origin", tenancy=acme),
        ConversationCreated(conversation_id="delegate", tenancy=acme, parent=parent),
        ConversationCreated(conversation_id="other", tenancy=Tenancy(tenant="other")),
        ConversationCreated(conversation_id="nobodys"),
    ):
        await log.create(created)
    await log.fork("origin", ConversationCreated(conversation_id="fork", tenancy=acme, forked_from="origin@1"), at=1)
    async with opened(made.node, sandbox="bwrap", named=load_tool_settings(made.environment).named) as workspaces:
        node = Node(log, Executor(log, workspaces, worker_id="tool-1"))
        for conversation_id in ("origin", "delegate", "fork"):
            answer = await node.run(conversation_id, f"echo {conversation_id} >> log; cat log", good)
            assert isinstance(answer, CmdOutputObservation)
        assert (good / "log").read_text() == "origin\ndelegate\nfork\n"
        for conversation_id in ("other", "nobodys"):
            answer = await node.run(conversation_id, "cat log; echo forged >> log", good)
            assert isinstance(answer, ErrorObservation)
            assert (answer.error_id, ANOTHERS in answer.content) == ("workspace_refused", True)
        for path in (
            made.home,
            made.neighbour / "workspace",
            made.neighbour / "host",
            Path("/etc"),
            made.roots / "link",
        ):
            answer = await node.run("other", "cat *; echo forged >> journal", path)
            assert isinstance(answer, ErrorObservation)
            assert (answer.error_id, "may not be a workspace" in answer.content) == ("workspace_refused", True)
    assert (good / "log").read_text() == "origin\ndelegate\nfork\n"
