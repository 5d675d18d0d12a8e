"""One conversation and models of several providers, one after another, through real clients and a real worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import AgentSpec, LLMSpec, ModelReply, ModelSwitched
from controller_worker.loop.replay import replay
from deckhands.client.reading.summary import summarize
from tests.faults.conftest import cluster  # noqa: F401  (a fixture)
from tests.faults.harness import FaultCluster
from tests.model_server.backends import KEY, SERVER_ARGUMENTS
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}]}
USAGE = {"usage": {"prompt_tokens": 2_000, "completion_tokens": 10}}
TURNS = [
    {"thinking": "Well.", **THINK, **USAGE},
    {"text": "First.", **USAGE},
    {"thinking": "Hm.", **THINK, **USAGE},
    {"text": "Second.", **USAGE},
    {"text": "Third.", **USAGE},
    {"text": "Fourth.", **USAGE},
    {"text": "Fifth.", **USAGE},
]
PROFILES = """
[llm]
model = "claude-test"
base_url = "{url}"
api_key = "{key}"
input_cost_per_token = 0.00005
output_cost_per_token = 0.01

[llm.claude]

[llm.gpt]
model = "test-model"
backend = "openai"
base_url = "{url}/v1"
native_tool_calling = true

[llm.lite]
model = "test-model"
backend = "litellm"
base_url = "{url}/v1"
native_tool_calling = true

[llm.stale]
api_key = "sk-withdrawn"
fallbacks = ["claude", "gpt"]
"""
CALL_USD = 2_000 * 0.00005 + 10 * 0.01


@pytest.mark.soak
async def test_a_conversation_goes_on_with_other_models_and_backends(
    cluster: FaultCluster,  # noqa: F811
    model_server: Callable[..., RunningModelServer],
    tmp_path: Path,
) -> None:
    script, profiles = tmp_path / "turns.json", tmp_path / "models.toml"
    script.write_text(json.dumps({"turns": TURNS}))
    server = model_server("--script", str(script), *SERVER_ARGUMENTS)
    profiles.write_text(PROFILES.format(url=server.url, key=KEY))
    cluster.start_controller(LLM_CONFIG=str(profiles))
    client = cluster.client
    cid = await client.submit("Begin.", agent=AgentSpec(llm=LLMSpec(model="claude")))
    await cluster.settle([cid])
    await client.send_message(cid, "Continue.", model="gpt")
    await cluster.settle([cid])
    await client.send_message(cid, "And on.", model="lite")
    await cluster.settle([cid])
    server.plan({"kind": "overloaded"})  # which claude will meet
    await client.send_message(cid, "And on and on.", model="stale")  # the key is no longer accepted
    await cluster.settle([cid])
    await client.send_message(cid, "To the end.", model="claude")
    await cluster.settle([cid])

    events = await client.events(cid)
    replies = [event for event in events if isinstance(event, ModelReply)]
    claude, gpt = "claude-test", "test-model"
    assert [reply.model for reply in replies] == [claude, claude, gpt, gpt, gpt, gpt, claude]
    assert [reply.content for reply in replies] == ["", "First.", "", "Second.", "Third.", "Fourth.", "Fifth."]
    switched = [event.model for event in events if isinstance(event, ModelSwitched)]
    assert switched == ["gpt", "lite", "stale", "claude"]
    assert replay(events).divergence is None

    asked = server.requests()
    messages, chat = "/v1/messages", "/v1/chat/completions"
    paths = [request["path"] for request in asked]
    assert paths == [messages, messages, chat, chat, chat, messages, messages, chat, messages]
    signed = {"type": "thinking", "thinking": "Well.", "signature": "sig-0"}
    assert [thoughts(asked[number]["body"]) for number in (1, 8)] == [[signed], [signed]]  # by its own provider only
    assert "Well." not in json.dumps([request["body"] for request in asked[2:5]])
    assert [names(asked[number]["body"]) for number in (2, 4)] == [names(asked[0]["body"])] * 2

    summary = summarize(events)
    totals: dict[str, Any] = summary.metrics.per_model()
    assert {name: round(used["accumulated_cost"], 6) for name, used in totals.items()} == {
        claude: round(3 * CALL_USD, 6),
        gpt: round(4 * CALL_USD, 6),
    }
    assert (round(summary.cost_usd, 6), summary.prompt_tokens) == (round(7 * CALL_USD, 6), 14_000)


def thoughts(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The thinking blocks of a request."""
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [block for content in contents for block in content if block["type"] == "thinking"]


def names(body: dict[str, Any]) -> list[str]:
    """The names of the tools of a request, of either form."""
    return [tool.get("function", tool)["name"] for tool in body["tools"]]
