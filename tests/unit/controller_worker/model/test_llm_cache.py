"""Cached and recorded replies: equality of requests, and the content of a recording."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import ModelReply, ModelToolCall, TokenUsage
from broker.contract.tool_specs import ToolSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError, RateLimitError
from controller_worker.providers.llm import CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall

TOOL = ToolSpec("f", "Do.", {"type": "object", "properties": {}})
HISTORY = (
    Message("user", (TextPart("Look."), ImagePart("data:image/png;base64,AAAA"))),
    Message("assistant", (), (ToolCall("a", "f", "{}"),), thinking_blocks=({"type": "thinking", "thinking": "hm"},)),
    Message("tool", (TextPart("seen"),), tool_call_id="a", name="f"),
)
REQUEST = ModelRequest(HISTORY, (TOOL,), "c1", 0, "/w")
TURN = {
    "text": "Grüß Gott",
    "thinking": "hm",
    "tool_calls": [{"name": "f", "arguments": '{"a'}],
    "usage": {"prompt_tokens": 7},
}


class Asked:
    """A cached scripted model; its cost tells whether it was called."""

    def __init__(self, folder: Path, *turns: dict[str, Any], **settings: Any) -> None:
        script = folder / "script.json"
        script.write_text(json.dumps({"turns": [{"cost_usd": 1.0} | turn for turn in turns or (TURN,)]}))
        config = {"model": f"scripted/{script}", "cache_dir": str(folder / "kept")} | settings
        self._llm = create_llm(LLMConfig.create(**config), SystemClock())

    async def __call__(self, request: ModelRequest = REQUEST) -> Completion:
        return await self._llm.complete(request)


async def is_asked(asked: Asked, request: ModelRequest = REQUEST) -> bool:
    return (await asked(request)).cost_usd != 0.0


async def test_the_same_request_is_asked_once(tmp_path: Path) -> None:
    first = await Asked(tmp_path)()
    again = await Asked(tmp_path, api_key="another", num_retries=1)(replace(REQUEST, conversation_id="c2"))
    assert (first.cost_usd, again.cost_usd) == (1.0, 0.0)
    assert replace(again, cost_usd=1.0, latency_seconds=first.latency_seconds) == first


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, messages=HISTORY[:1]),
        replace(REQUEST, messages=(replace(HISTORY[0], content=(TextPart("Look!"),)), *HISTORY[1:])),
        replace(REQUEST, tools=()),
        replace(REQUEST, temperature=1.0),
        replace(REQUEST, stop=("x",)),
    ],
    ids=["shorter", "another word", "no tools", "temperature", "stop"],
)
async def test_another_request_is_asked(tmp_path: Path, request_: ModelRequest) -> None:
    asked = Asked(tmp_path)
    assert [await is_asked(asked), await is_asked(asked, request_), await is_asked(asked, request_)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("settings", [{"cache_scope": "sample-2"}, {"temperature": 1.0}, {"seed": 5}])
async def test_other_settings_are_another_request(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert await is_asked(Asked(tmp_path))
    assert await is_asked(Asked(tmp_path, **settings))


async def test_an_error_is_not_kept(tmp_path: Path) -> None:
    asked = Asked(tmp_path, TURN | {"error": {"code": "rate_limit", "times": 1}})
    with pytest.raises(RateLimitError):
        await asked()
    assert [await is_asked(asked), await is_asked(asked)] == [True, False]


async def test_a_kept_reply_grows_old_and_may_be_damaged(tmp_path: Path) -> None:
    asked = Asked(tmp_path, cache_ttl_seconds=100.0)
    assert await is_asked(asked)
    (kept,) = (tmp_path / "kept").rglob("*.json")
    os.utime(kept, (0, 0))
    assert [await is_asked(asked), await is_asked(asked)] == [True, False]
    kept.write_text("{")
    assert [await is_asked(asked), await is_asked(asked)] == [True, False]


async def test_replies_are_kept_in_a_store_of_objects(tmp_path: Path) -> None:
    url = f"memory://replies-of-{tmp_path.name}"
    cached = Asked(tmp_path, TURN, cache_dir=url)
    first = await cached()
    again = await cached()
    assert first.cost_usd != 0.0
    assert replace(again, latency_seconds=0.0) == replace(first, cost_usd=0.0, latency_seconds=0.0)
    other = Asked(tmp_path, TURN, cache_dir=url, cache_scope="2")
    assert (await other()).cost_usd != 0.0
    old = Asked(tmp_path, TURN, cache_dir=url, cache_ttl_seconds=1e-9)
    assert (await old()).cost_usd != 0.0


async def test_a_store_that_is_unknown_costs_the_cache_only(tmp_path: Path) -> None:
    cached = Asked(tmp_path, TURN, cache_dir="no-such-protocol://replies")
    assert (await cached()).text == (await cached()).text == "Grüß Gott"


async def test_no_key_is_in_the_cache(tmp_path: Path) -> None:
    await Asked(tmp_path, api_key="sk-very-secret")()
    (kept,) = (tmp_path / "kept").rglob("*.json")
    assert "sk-very-secret" not in kept.read_text() + str(kept)


async def test_a_disk_that_takes_nothing_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where the directory should be")
    asked = Asked(tmp_path)
    assert [await is_asked(asked), await is_asked(asked)] == [True, True]


# Recordings

REPLIES = [
    ModelReply(
        id=5,
        content="I look.",
        tool_calls=(ModelToolCall(id="t", name="f", arguments="{", problem="cut"),),
        thinking_blocks=({"type": "thinking", "thinking": "hm", "signature": "s"},),
        model="m",
        response_id="r",
        stop_reason="tool_calls",
        usage=TokenUsage(prompt_tokens=3, completion_tokens=2),
        cost_usd=0.5,
    ),
    ModelReply(id=9, content="Done."),
]


def recorded(folder: Path, *further: str) -> str:
    path = folder / "events.jsonl"
    lines = [json.dumps({"kind": "message", "id": 1})]
    lines += [json.dumps({"id": reply.id, "timestamp": None} | reply.wire()) for reply in REPLIES]
    path.write_text("\n".join([*lines, *further]) + "\n")
    return f"replay/{path}"


async def test_a_recording_says_its_replies_again(tmp_path: Path) -> None:
    shown: list[Delta] = []
    llm = create_llm(LLMConfig.create(model=recorded(tmp_path)), SystemClock())
    assert await llm.complete(replace(REQUEST, on_delta=shown.append)) == Completion(
        text="I look.",
        tool_calls=(ToolCall("t", "f", "{", "cut"),),
        thinking_blocks=({"type": "thinking", "thinking": "hm", "signature": "s"},),
        model="m",
        response_id="r",
        stop_reason="tool_calls",
        usage=CallUsage(prompt_tokens=3, completion_tokens=2),
        cost_usd=0.0,
        latency_seconds=0.0,
    )
    assert shown == [Delta("text", "I look.")]
    assert (await llm.complete(replace(REQUEST, iteration=1))).text == "Done."
    with pytest.raises(LLMConfigError, match=r"ends after 2 replies; this would be number 3"):
        await llm.complete(replace(REQUEST, iteration=2))


def test_invalid_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LLMConfigError, match="cannot be read: No such file"):
        create_llm(LLMConfig.create(model="replay/none.jsonl"), SystemClock())
    with pytest.raises(LLMConfigError, match="line 4 is not an event"):
        create_llm(LLMConfig.create(model=recorded(tmp_path, "{")), SystemClock())
