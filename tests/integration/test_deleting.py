"""`Client.delete`: what may be deleted, with its delegates, while others continue."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, DelegateEnded, Event, Parent
from deckhands import Client, UnknownConversation, UsageError
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import state


@pytest.fixture
async def client(valkey_server: RealServer) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        yield client


async def begin(client: Client, name: str, its_state: str, *events: Event, parent: Parent | None = None) -> None:
    await client.log.create(ConversationCreated(conversation_id=name, parent=parent), [state("running")])
    await client.log.append(name, [*events, state(its_state)], fields={"state": its_state})


def ended(name: str) -> DelegateEnded:
    return DelegateEnded(delegate_id=2, conversation_id=name, agent_state=AgentState.FINISHED)


@pytest.mark.parametrize("its_state", ["finished", "error", "rejected", "stopped", "paused", "awaiting_user_input"])
async def test_what_rests_is_deleted(client: Client, its_state: str) -> None:
    await begin(client, "one", its_state)
    await client.delete("one")
    with pytest.raises(UnknownConversation):
        await client.row("one")
    with pytest.raises(UnknownConversation):
        await client.delete("one")


async def test_what_runs_is_not(client: Client) -> None:
    await begin(client, "one", "running")
    with pytest.raises(UsageError, match="is running; only a settled one") as caught:
        await client.delete("one")
    assert "rm --cancel" in caught.value.remedy
    await begin(client, "two", "finished")
    await client.send_message("two", "Continue.")
    with pytest.raises(UsageError, match="only a settled one"):
        await client.delete("two")


async def test_delegates_go_with_their_parent_and_not_before_it(client: Client) -> None:
    await begin(client, "parent", "running")
    await begin(
        client, "child", "finished", ended("grandchild"), parent=Parent(conversation_id="parent", delegate_id=2)
    )
    await begin(client, "grandchild", "finished", parent=Parent(conversation_id="child", delegate_id=2))
    with pytest.raises(UsageError, match="is a delegate of parent, which is running"):
        await client.delete("child")
    await client.log.append(
        "parent", [ended("child"), ended("gone-before"), state("finished")], fields={"state": "finished"}
    )
    await client.delete("parent")
    assert await client.recent() == []


async def test_a_damaged_log_is_deleted(client: Client) -> None:
    await begin(client, "one", "finished")
    names = client.store.keys("one")
    await client.store.connection.call("XDEL", names.events, "2-0")
    await client.delete("one")
    await begin(client, "two", "running")
    await client.store.connection.call("XDEL", client.store.keys("two").events, "2-0")
    with pytest.raises(UsageError, match="only a settled one"):
        await client.delete("two")
