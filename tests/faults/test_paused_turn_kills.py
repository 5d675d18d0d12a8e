"""A controller worker killed between two parts of a turn that the provider has paused: the log has one reply.

Its blocks return to Claude as they were, in a fork and at another profile, and to nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from broker.contract.events import AgentSpec, LLMSpec, ModelReply, TokenUsage
from broker.contract.specs import WorkspaceSpec
from tests.faults.harness import FaultCluster
from tests.integration.recorded_wires import Exchange, RecordedServer
from tests.polling import unhurried

PATH = "/v1/messages"
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
FINISH = {"type": "tool_use", "id": "t1", "name": "finish", "input": {"message": "Done."}}
PROFILES = """
[llm.first]
model = "anthropic/claude-sonnet-4-5"
base_url = "{url}"
api_key = "sk-first"
fallbacks = ["second"]

[llm.second]
model = "anthropic/claude-opus-4-5"
base_url = "{url}"
api_key = "sk-second"
"""


@pytest.fixture
def provider() -> Iterator[RecordedServer]:
    server = RecordedServer()
    yield server
    server.stop()


def part(*blocks: dict[str, Any], stop: str) -> Exchange:
    usage = {"input_tokens": 3_000, "output_tokens": 40}
    reply = {"id": "msg_1", "model": "claude-sonnet-4-5", "content": list(blocks), "stop_reason": stop, "usage": usage}
    return Exchange(path=PATH, request={}, reply=reply)


async def test_killed_between_the_parts_of_a_turn(cluster: FaultCluster, provider: RecordedServer) -> None:
    paused, ended = part(SEARCH, stop="pause_turn"), part(FOUND, FINISH, stop="tool_use")
    refused = Exchange(path=PATH, request={}, status=401, reply={"error": {"message": "invalid x-api-key"}})
    silence = Exchange(path=PATH, request={}, stream=(": nothing yet",), connection="held_open")
    again = part(FINISH | {"id": "t2"}, stop="tool_use")
    provider.prepare([paused, silence, paused, ended, again, refused, again], is_streamed=True)
    profiles = cluster.root / "models.toml"
    profiles.write_text(PROFILES.format(url=provider.url))
    settings = {"LLM_CONFIG": str(profiles)}
    cluster.start_tool()
    cluster.start_controller("victim", **settings)
    folder = cluster.root / "work" / "w"
    folder.mkdir(parents=True, exist_ok=True)
    conversation_id = await cluster.client.submit(
        "do it", agent=AgentSpec(llm=LLMSpec(model="first")), workspace=WorkspaceSpec(path=str(folder), sandbox="none")
    )
    await cluster.until(lambda: len(provider.seen) == 2, limit=unhurried(60.0), what="the second part")
    cluster.kill("victim")
    cluster.start_controller("survivor", **settings)
    await cluster.settle([conversation_id], limit=unhurried(60.0))

    events = await cluster.client.events(conversation_id)
    (reply,) = [event for event in events if isinstance(event, ModelReply)]
    assert [call.name for call in reply.tool_calls] == ["finish"]
    assert reply.usage == TokenUsage(prompt_tokens=6_000, completion_tokens=80)
    blocks = [block["block"] for block in reply.thinking_blocks]
    assert blocks == [SEARCH, FOUND, {"type": "tool_use", "id": "t1"}]
    bodies = [json.dumps(body["messages"]) for _, _, body in provider.seen]
    assert bodies[0] == bodies[2]  # the turn began again
    assert bodies[1] == bodies[3]
    assert [body["messages"][-1]["content"] for _, _, body in provider.seen[1::2]] == [[SEARCH]] * 2

    fork_id = await cluster.client.fork(conversation_id)
    await cluster.client.send_message(fork_id, "Thanks.")
    await cluster.until(lambda: len(provider.seen) == 5, limit=unhurried(60.0), what="the fork's question")
    await cluster.settle([fork_id], limit=unhurried(60.0))
    await cluster.client.send_message(conversation_id, "Thanks.")
    await cluster.until(lambda: len(provider.seen) == 7, limit=unhurried(60.0), what="the fallback's question")
    await cluster.settle([conversation_id], limit=unhurried(60.0))
    for _, _, body in provider.seen[4:]:
        (written,) = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        assert written == [SEARCH, FOUND, FINISH]
    assert [body["model"] for _, _, body in provider.seen[4:]] == ["claude-sonnet-4-5"] * 2 + ["claude-opus-4-5"]
