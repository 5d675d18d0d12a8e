"""Turns that Anthropic pauses: how often they continue, what they cost, and what a failure in them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from controller_worker.providers.anthropic_backend import PAUSES_LIMIT
from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from tests.integration.llm_requests import opened
from tests.integration.recorded_wires import Exchange, RecordedServer

SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
USAGE = {"input_tokens": 100, "output_tokens": 10}
MESSAGES = (Message("user", (TextPart("hi"),)),)


@pytest.fixture(scope="module")
def server() -> Iterator[RecordedServer]:
    running = RecordedServer()
    yield running
    running.stop()


def part(*blocks: dict[str, Any], stop: str = "pause_turn") -> Exchange:
    message = {"id": "m", "model": "claude-x", "content": list(blocks), "stop_reason": stop, "usage": USAGE}
    return Exchange(path="/v1/messages", request={}, reply=message)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def asked(server: RecordedServer, *exchanges: Exchange, **changes: Any) -> Completion:
    server.prepare(exchanges, is_streamed=False)
    settings: dict[str, Any] = {"input_cost_per_token": 1.0, "output_cost_per_token": 2.0, "max_output_tokens": 1000}
    async with opened(model="anthropic/claude-x", base_url=server.url, api_key="sk-test", **settings) as llm:
        return await llm.complete(ModelRequest(MESSAGES, (), "c1", 0, "/w", **changes))


async def test_all_parts_are_paid_for(server: RecordedServer) -> None:
    reply = await asked(server, part(text("One. "), SEARCH), part(text("Two."), stop="end_turn"))
    assert (reply.text, reply.stop_reason) == ("One. Two.", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (200, 20)
    assert reply.cost_usd == 200 * 1.0 + 20 * 2.0


async def test_endlessly_pausing_turn_ends_with_its_results(server: RecordedServer) -> None:
    reply = await asked(server, *[part(text("Again. "), SEARCH)] * (PAUSES_LIMIT + 5))
    assert len(server.seen) == PAUSES_LIMIT + 1
    assert (reply.text, reply.stop_reason) == ("Again. " * (PAUSES_LIMIT + 1), "pause_turn")
    assert reply.usage.prompt_tokens == 100 * (PAUSES_LIMIT + 1)


REFUSED = Exchange(path="/v1/messages", request={}, status=529, reply={"error": {"type": "overloaded_error"}})


@pytest.mark.parametrize(
    ("exchanges", "code", "retryable"),
    [
        ([part(SEARCH)] * (PAUSES_LIMIT + 1), "no_response", True),
        ([part(text("One. "), SEARCH), REFUSED], "service_unavailable", True),
        ([part(text("One. "), SEARCH), part(text("I"), stop="refusal")], "content_policy", False),
    ],
    ids=["never says anything", "a part fails", "a refusal behind a pause"],
)
async def test_the_failure_of_a_part_is_that_of_the_call(
    server: RecordedServer, exchanges: list[Exchange], code: str, retryable: bool
) -> None:
    with pytest.raises(ModelError) as caught:
        await asked(server, *exchanges)
    assert (caught.value.code, caught.value.retryable) == (code, retryable)


async def test_part_from_a_batch_continues_over_the_connection(server: RecordedServer) -> None:
    batched: list[bytes] = []

    async def carry(body: bytes) -> Any:
        batched.append(body)
        return part(text("One. "), SEARCH).reply

    reply = await asked(server, part(text("Two."), stop="end_turn"), carry=carry)
    assert (reply.text, len(batched), len(server.seen)) == ("One. Two.", 1, 1)
    # Half the price for the part that the batch has brought.
    assert reply.cost_usd == (100 * 1.0 + 10 * 2.0) * 1.5
