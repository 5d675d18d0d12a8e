"""Attempts in the formats of other tools; `tests/end_to_end/test_evaluation_peers.py` reads them with the real ones."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import SystemMessageAction
from broker.contract.events import Event, ModelReply, ModelToolCall, TokenUsage, ToolCallMetadata
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from deckhands.evaluation.exports.atif import to_atif
from deckhands.evaluation.exports.dialogue import Dialogue, to_dialogue
from deckhands.evaluation.exports.inspect_log import to_inspect_log
from deckhands.evaluation.exports.sft import to_sft
from tests.unit.deckhands.sample_log import CONVERSATION_ID, created, numbered, user

ROW: dict[str, Any] = {
    "instance": "one",
    "model": "m",
    "attempt": 1,
    "outcome": "resolved",
    "cause": "",
    "evidence": "OK",
    "conversation_id": CONVERSATION_ID,
    "cost_usd": 0.5,
    "iterations": 2,
    "tags": [],
    "seconds": 3.0,
    "patch": "",
    "prompt_tokens": 30,
    "completion_tokens": 5,
}


def a_reply(call: ModelToolCall, content: str = "", **fields: object) -> ModelReply:
    usage = TokenUsage(prompt_tokens=15, completion_tokens=2)
    return ModelReply(model="acme/large", content=content, tool_calls=(call,), usage=usage, cost_usd=0.25, **fields)


def dialogue() -> Dialogue:
    metadata = ToolCallMetadata(function_name="execute_bash", tool_call_id="a", reply_id=4)
    answered = CmdOutputObservation(
        command="ls",
        content="x.py",
        metadata=CmdOutputMetadata(exit_code=0),
        source="environment",
        tool_call_metadata=metadata,
    )
    thought = ({"type": "thinking", "thinking": "Look."},)
    events: list[Event] = numbered(
        created(),
        user("Fix it."),
        SystemMessageAction(content="You are an agent.", tools=("execute_bash",), version="1"),
        a_reply(ModelToolCall(id="a", name="execute_bash", arguments='{"command": "ls"}'), thinking_blocks=thought),
        answered,
        ModelReply(model="acme/large", content="A verdict.", service="critic"),
        a_reply(ModelToolCall(id="b", name="finish", arguments='{"message": "Done."}'), "I finish."),
        a_reply(ModelToolCall(id="c", name="odd", arguments="no json")),
    )
    return to_dialogue(CONVERSATION_ID, events)


def test_log_becomes_a_dialogue_starting_with_the_system_prompt() -> None:
    found = dialogue()
    assert [turn.role for turn in found.turns] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert (found.task, found.last_message, found.model, found.version) == ("Fix it.", "Done.", "acme/large", "1")
    assert found.turns[-1].calls[0].arguments == {"_raw": "no json"}


def test_a_step_of_atif_has_the_answers_to_its_calls() -> None:
    found = to_atif(dialogue(), ROW)
    assert [step["step_id"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    step = found["steps"][2]
    (result,) = step["observation"]["results"]
    assert (result["source_call_id"], result["content"]) == ("a", "x.py\n[Command finished with exit code 0]")
    assert step["reasoning_content"] == "Look."
    assert found["final_metrics"]["total_prompt_tokens"] == 45


def test_each_call_of_an_example_is_answered_in_place() -> None:
    messages = to_sft(dialogue(), ROW)["messages"]
    assert [message["role"] for message in messages][2:] == [*("assistant", "tool"), *("assistant", "tool") * 2]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ["a", "b", "c"]


@pytest.mark.parametrize("outcome", ["infra-abandoned", "setup_failed"])
def test_attempts_without_a_score_are_errors_outside_inspects_metrics(outcome: str) -> None:
    abandoned = {**ROW, "instance": "two", "outcome": outcome, "cause": "provider"}
    limited = {**ROW, "instance": "three", "outcome": "limit", "cause": "time"}
    left = {**ROW, "instance": "four", "outcome": "not-run", "cause": "cancelled"}
    log = to_inspect_log("e", "data", "m", [(ROW, dialogue()), (abandoned, None), (limited, None), (left, None)])
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    one, two, three = log["samples"]
    assert one["scores"]["deckhands"]["value"] == "C"
    assert "scores" not in two
    assert "provider" in two["error"]["message"]
    assert three["limit"]["type"] == "time"


def test_the_transcript_of_inspect_has_each_message_once() -> None:
    log = to_inspect_log("e", "data", "m", [(ROW, dialogue())])
    first, tool, second, third, score = log["samples"][0]["events"]
    assert [message["role"] for message in first["input"]] == ["system", "user"]
    assert first["output"]["choices"][0]["stop_reason"] == "tool_calls"
    assert first["output"]["usage"]["total_tokens"] == 17
    assert (tool["id"], tool["function"], tool["arguments"]) == ("a", "execute_bash", {"command": "ls"})
    assert tool["result"].startswith("x.py")
    assert [message["role"] for message in second["input"]] == ["tool"]
    assert third["input"] == []
    assert (score["event"], score["score"]["value"]) == ("score", "C")


def test_exports_keep_rewards_as_numbers() -> None:
    row = ROW | {"outcome": "unresolved", "reward": 0.5, "metrics": {"speed": 2.0}, "step_rewards": [0.0, 0.25, 0.5]}
    steps = [step for step in to_atif(dialogue(), row)["steps"] if step["source"] == "agent"]
    assert [step["extra"]["reward"] for step in steps] == [0.0, 0.25, 0.5]
    about = to_sft(dialogue(), row)["metadata"]
    assert (about["reward"], about["metrics"], about["step_rewards"]) == (0.5, {"speed": 2.0}, [0.0, 0.25, 0.5])
    log = to_inspect_log("one", "rows", "acme/large", [(row, dialogue())])
    assert log["samples"][0]["scores"]["deckhands"]["value"] == 0.5
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    assert "reward" not in to_sft(dialogue(), ROW)["metadata"]
