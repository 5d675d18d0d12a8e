"""Every provider's wire, request by request, against recorded exchanges: no quirk gets lost.

A file of tests/integration/recorded_wires is a scenario. It is tried with each backend that it names, with whole
replies and with streams, as far as it holds them. Turns that Anthropic pauses have their own tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller_worker.providers.anthropic_backend import PAUSES_LIMIT
from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from tests.integration import recorded_wires
from tests.integration.llm_requests import opened
from tests.integration.recorded_wires import (
    Exchange,
    RecordedServer,
    Recording,
    canonical,
    expected_request,
    played,
    recordings,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

in_one_loop = pytest.mark.asyncio(loop_scope="module")
"""litellm keeps connections for a loop, and leaves them open behind its end."""
RECORDINGS = recordings()
CASES = [
    pytest.param(recording, backend, is_streamed, id=f"{name}-{backend}-{'stream' if is_streamed else 'whole'}")
    for name, recording in RECORDINGS.items()
    for backend in recording.backends
    for is_streamed in recording.forms
]
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def server() -> Iterator[RecordedServer]:
    running = RecordedServer()
    yield running
    running.stop()


async def check(recording: Recording, backend: str, server: RecordedServer, *, is_streamed: bool) -> None:
    outcome = await played(recording, backend, server, is_streamed=is_streamed)
    for exchange, (path, headers, body) in zip(recording.exchanges, server.seen, strict=True):
        assert path.partition("?")[0].replace(recorded_wires.IN_THE_PATH, ":generateContent") == exchange.path
        assert {name: headers.get(name) for name in exchange.headers} == exchange.headers
        assert recorded_wires.KEY in " ".join((path, *headers.values()))
        assert canonical(body) == canonical(expected_request(recording, exchange, backend, is_streamed=is_streamed))
    assert canonical(outcome) == canonical(recorded_wires.expected_outcome(recording, backend, is_streamed=is_streamed))


@in_one_loop
@pytest.mark.parametrize(("recording", "backend", "is_streamed"), CASES)
async def test_recorded(recording: Recording, backend: str, is_streamed: bool, server: RecordedServer) -> None:
    await check(recording, backend, server, is_streamed=is_streamed)


def test_there_is_a_recording_of_each_kind() -> None:
    assert len(RECORDINGS) >= 30
    assert {backend for recording in RECORDINGS.values() for backend in recording.backends} == {
        *("anthropic", "openai", "litellm"),
    }
    assert all(recording.forms for recording in RECORDINGS.values())


@in_one_loop
async def test_the_documented_recording_works(server: RecordedServer) -> None:
    section = DOCS.read_text("utf-8").partition("## A recorded exchange with a provider")[2]
    found = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    recording = Recording.model_validate_json(found[1])
    assert recording.forms == [False, True]
    for backend in recording.backends:
        for is_streamed in recording.forms:
            await check(recording, backend, server, is_streamed=is_streamed)


SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
USAGE = {"input_tokens": 100, "output_tokens": 10}
MESSAGES = (Message("user", (TextPart("hi"),)),)


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
