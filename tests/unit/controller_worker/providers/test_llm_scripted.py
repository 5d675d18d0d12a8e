"""Scripted models."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, AgentThinkAction
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import InternalServerError, LLMConfigError, RateLimitError
from controller_worker.providers.llm import CallUsage, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.scripted import ScriptedLLM


def scripted(tmp_path: Path, script: Any, **settings: Any) -> ScriptedLLM:
    path = tmp_path / "script.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script))
    llm = create_llm(LLMConfig(model=f"scripted/{path}", **settings), SystemClock())
    assert isinstance(llm, ScriptedLLM)
    return llm


def request(iteration: int, conversation_id: str = "c1") -> ModelRequest:
    return ModelRequest((Message("user", (TextPart("hi"),)),), (), conversation_id, iteration, "/home/agent")


async def test_turns_follow_the_iteration(tmp_path: Path) -> None:
    arguments = {"command": "ls {workspace}", "lines": [1, "{workspace}"]}
    calls = [{"name": "execute_bash", "arguments": arguments}, {"name": "broken", "arguments": '{"path": "{workspace}'}]
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "cache_read_tokens": 4}
    turns = [{"text": "Let me look.", "tool_calls": calls, "usage": usage}, {"text": "Done.", "thinking": "hm"}]
    llm = scripted(tmp_path, {"description": "two calls, then words", "turns": turns})
    first = await llm.complete(request(0))
    assert first.text == "Let me look."
    assert first.tool_calls == (
        ToolCall("call_0001_0", "execute_bash", '{"command": "ls /home/agent", "lines": [1, "/home/agent"]}'),
        ToolCall("call_0001_1", "broken", '{"path": "/home/agent'),
    )
    assert (first.stop_reason, first.response_id, first.cost_usd) == ("tool_calls", "scripted-c1-0", None)
    assert first.usage == CallUsage(prompt_tokens=10, completion_tokens=2, cache_read_tokens=4)
    second = await llm.complete(request(1))
    assert (second.text, second.tool_calls, second.stop_reason) == ("Done.", (), "stop")
    assert second.thinking_blocks == ({"type": "thinking", "thinking": "hm"},)


async def test_after_the_last_turn_it_finishes_or_ends_in_words(tmp_path: Path) -> None:
    llm, tools = scripted(tmp_path, {"turns": []}), (AgentThinkAction.tool_spec, AgentFinishAction.tool_spec)
    reply = await llm.complete(replace(request(7), tools=tools))
    assert reply.tool_calls == (ToolCall("call_0008_0", "finish", '{"message": "The script has ended."}'),)
    assert reply.text == ""
    words = await llm.complete(replace(request(7), tools=tools[:1]))
    assert (words.text, words.tool_calls, words.stop_reason) == ("The script has ended.", (), "stop")


async def test_a_repeated_step_gets_the_same_reply_from_anybody(tmp_path: Path) -> None:
    script = {"turns": [{"tool_calls": [{"name": "a"}]}, {"tool_calls": [{"name": "b"}, {"name": "c", "id": "own"}]}]}
    first, second = scripted(tmp_path, script), scripted(tmp_path, script)
    said = await first.complete(request(1))
    assert [call.id for call in said.tool_calls] == ["call_0002_0", "own"]
    again = await second.complete(request(1))
    assert (again.tool_calls, again.response_id) == (said.tool_calls, said.response_id)


async def test_errors_are_raised_so_many_times(tmp_path: Path) -> None:
    error = {"code": "rate_limit", "times": 2, "text": "slow down", "retry_after_seconds": 1.5}
    for_ever = {"error": {"code": "internal", "times": None}}
    llm = scripted(tmp_path, {"turns": [{"text": "at last", "error": error}, for_ever]})
    for _ in range(2):
        with pytest.raises(RateLimitError) as caught:
            await llm.complete(request(0))
        assert (caught.value.retry_after_seconds, caught.value.provider_text) == (1.5, "slow down")
    assert (await llm.complete(request(0))).text == "at last"
    with pytest.raises(RateLimitError):
        await llm.complete(request(0, "another"))
    for _ in range(5):
        with pytest.raises(InternalServerError):
            await llm.complete(request(1))


async def test_costs_are_told_computed_or_unknown(tmp_path: Path) -> None:
    script = {"turns": [{"usage": {"prompt_tokens": 100, "completion_tokens": 10}}, {"cost_usd": 0.25}]}
    priced = scripted(tmp_path, script, input_cost_per_token=1e-6, output_cost_per_token=2e-6)
    assert (await priced.complete(request(0))).cost_usd == pytest.approx(120e-6)
    assert (await priced.complete(request(1))).cost_usd == 0.25
    unpriced = scripted(tmp_path, script)
    assert (await unpriced.complete(request(0))).cost_usd is None


async def test_the_latency_can_be_cancelled(tmp_path: Path) -> None:
    llm = scripted(tmp_path, {"latency_seconds": 3_600, "turns": [{"text": "quick", "latency_seconds": 0}]})
    assert (await llm.complete(request(0))).text == "quick"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await llm.complete(request(1))
    await llm.aclose()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[]", "is not a script: the whole: "),
        ('{"turns": [{"text": "a"}, {"txt": "b"}]}', "is not a script: turns.1.txt: Extra inputs are not permitted."),
        (
            '{"turns": [{"error": {"code": "oops"}}]}',
            "turns.0.error.code: 'oops' is not an error code; use one of auth",
        ),
        ('{"turns": [{"tool_calls": [{"arguments": {}}]}]}', "turns.0.tool_calls.0.name: Field required."),
        ('{"latency_seconds": -1}', "latency_seconds: "),
    ],
)
def test_a_bad_script_is_refused_and_the_place_is_named(tmp_path: Path, script: str, complaint: str) -> None:
    with pytest.raises(LLMConfigError) as caught:
        scripted(tmp_path, script)
    assert complaint in str(caught.value)
    assert "script.json" in str(caught.value)


def test_the_documented_example_is_a_script(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    example = text.partition("## Scripted models\n")[2].partition("```json\n")[2].partition("```")[0]
    assert scripted(tmp_path, example)._script.turns[1].error is not None
