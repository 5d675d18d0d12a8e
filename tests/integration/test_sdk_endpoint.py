"""The endpoint that the SDK's CLI uses as its provider: authorised callers, replies, and secrets that stay inside.

Another program of the machine that finds its port may forge requests, if there is no sandbox. Without the token it
gets no reply and moves nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from controller_worker.loop.sdk.endpoint import PREFIX, Endpoint

TOKEN = "the-token"
HEADERS = {"x-api-key": TOKEN}
TOOLS = [{"name": f"{PREFIX}think", "input_schema": {"type": "object"}}]
REPLY = {
    "id": "msg_7",
    "model": "m",
    "text": "hm",
    "calls": [{"id": "toolu_7_0", "name": "think", "input": {"thought": "é"}}],
}
LAST = {"id": "msg_9", "model": "m", "text": "done", "calls": []}
BEGUN = [{"role": "user", "content": "go"}]
CONTINUED = [
    *BEGUN,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_7_0", "name": "think", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_7_0", "content": "ok"}]},
]


class Served:
    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, asked: list[int]) -> None:
        self.client, self.endpoint, self.asked = client, endpoint, asked

    async def post(self, messages: Any, *, tools: Any = TOOLS, headers: Any = HEADERS) -> httpx.Response:
        body = {"model": "m", "stream": True, "messages": messages, "tools": tools}
        return await self.client.post("/v1/messages?beta=true", json=body, headers=headers)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    asked: list[int] = []
    endpoint = Endpoint(TOKEN, asked.append)
    async with httpx.AsyncClient(base_url=await endpoint.start(), timeout=20.0) as client:
        yield Served(client, endpoint, asked)
    assert endpoint._server is not None
    endpoint._server.close()


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


async def test_a_call_waits_for_its_reply_and_has_its_ids(served: Served) -> None:
    waiting = asyncio.create_task(served.post(BEGUN))
    while not served.asked:
        await asyncio.sleep(0)
    served.endpoint.provide_reply(REPLY)
    events = [event for event in events_of(await waiting) if event["type"] != "ping"]
    assert events[0]["message"]["id"] == "msg_7"
    (begun,) = [event["content_block"] for event in events if event.get("content_block", {}).get("type") == "tool_use"]
    assert (begun["id"], begun["name"]) == ("toolu_7_0", f"{PREFIX}think")
    written = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert json.loads("".join(written)) == {"thought": "é"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert served.asked == [1]


async def test_a_reply_of_the_log_is_given_without_asking(served: Served) -> None:
    served.endpoint.provide_reply(REPLY)
    served.endpoint.provide_reply(LAST)
    await served.post(BEGUN)
    events = events_of(await served.post(CONTINUED))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert served.asked == []


async def test_a_lost_answer_is_given_again(served: Served) -> None:
    served.endpoint.provide_reply(REPLY)
    served.endpoint.provide_reply(LAST)
    first, again = [events_of(await served.post(BEGUN)) for _ in range(2)]
    assert first == again
    assert events_of(await served.post(CONTINUED)) != first


async def test_request_without_the_token_gets_no_reply(served: Served) -> None:
    served.endpoint.provide_reply(REPLY)
    for headers in ({}, {"x-api-key": "guessed"}, {"authorization": "Bearer guessed"}):
        assert (await served.post(BEGUN, headers=headers)).status_code == 401, headers
    assert events_of(await served.post(BEGUN))[1]["message"]["id"] == "msg_7"  # nothing was taken away


async def test_calls_beside_the_conversation_stay_here(served: Served) -> None:
    served.endpoint.provide_reply(REPLY)
    assert events_of(await served.post(BEGUN, tools=[]))[1]["message"]["id"] != "msg_7"
    counted = await served.client.post("/v1/messages/count_tokens", json={}, headers=HEADERS)
    assert counted.json() == {"input_tokens": 1}
    assert (await served.client.get("/v1/models", headers=HEADERS)).status_code == 404
    assert served.asked == []


async def test_invalid_request_is_refused(served: Served) -> None:
    for body in (b"", b"[]", b"{", b'{"messages": 1, "tools": 7}', b"\xff"):
        assert (await served.client.post("/v1/messages", content=body, headers=HEADERS)).status_code == 400, body
    served.endpoint.provide_reply(REPLY)
    assert events_of(await served.post(BEGUN))[1]["message"]["id"] == "msg_7"
