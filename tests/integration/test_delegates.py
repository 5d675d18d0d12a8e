"""The delegates of one conversation on a real store: where they are begun, and what they begin with."""

from __future__ import annotations

from typing import Any

import pytest

from broker.conversations import Conversations
from broker.events import AgentSpec, ConversationCreated, Event, Limits, LLMSpec, WorkspaceSpec
from controller_worker.delegates import conversation_id_of
from tests.conversation_hands import CID, Hands
from tests.polling import until

WHERE = WorkspaceSpec(path="/srv/project")


async def delegate_of(hands: Hands, *, node: str = "", **fields: Any) -> tuple[str, list[Event]]:
    """Let a conversation delegate; return the delegate's id and log."""
    helper = AgentSpec(name="ReadOnlyAgent", llm=LLMSpec(model="acme/small"))
    call = {"name": "delegate", "arguments": {"agent": "helper", "task": "look"}}
    model = LLMSpec(model=f"scripted/{hands.folder / 'script.json'}")
    agent = AgentSpec(llm=model, enable_delegation=True, delegates={"helper": helper})
    await hands.begin({"tool_calls": [call]}, agent=agent, **fields)
    if node:
        await hands.store.connection.call("HSET", hands.store.keys(CID).meta, "node", node)
    loop = await hands.go()
    await until(lambda: bool(loop.state.delegates), what="a delegate")
    delegate_id = conversation_id_of(CID, loop.state.delegates[0].id)
    return delegate_id, await hands.log.read(delegate_id)


async def test_a_delegate_begins_with_its_task_its_share_and_its_parent(hands: Hands) -> None:
    limits = Limits(max_iterations=11, max_tokens=10_000)
    delegate_id, (created, message) = await delegate_of(hands, workspace=WHERE, limits=limits, headless=False)
    assert isinstance(created, ConversationCreated)
    assert (created.agent.name, created.agent.llm.model) == ("ReadOnlyAgent", "acme/small")
    assert (created.workspace, created.headless) == (WHERE, False)
    assert created.parent is not None
    assert conversation_id_of(CID, created.parent.delegate_id) == delegate_id
    assert (created.parent.conversation_id, created.parent.level) == (CID, 1)
    assert (created.limits.max_iterations, created.limits.max_tokens) == (10, 10_000)
    assert message.sentence == "TASK: look"


@pytest.mark.parametrize(("workspace", "node"), [(WHERE, "node7"), (WorkspaceSpec(), "")])
async def test_a_delegate_works_where_its_parent_does_if_they_share_a_directory(
    hands: Hands, workspace: WorkspaceSpec, node: str
) -> None:
    delegate_id, _ = await delegate_of(hands, workspace=workspace, node="node7")
    assert (await Conversations(hands.store).row(delegate_id)).node == node
