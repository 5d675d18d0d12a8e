"""Every provider's wire, request by request, against recorded exchanges: no quirk gets lost.

A file of tests/integration/recorded_wires is a scenario. It is tried with each backend that it names, with whole
replies and with streams, as far as it holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.recorded_wires import (
    IN_THE_PATH,
    KEY,
    RecordedServer,
    Recording,
    canonical,
    expected_outcome,
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
        assert path.partition("?")[0].replace(IN_THE_PATH, ":generateContent") == exchange.path
        assert {name: headers.get(name) for name in exchange.headers} == exchange.headers
        assert KEY in " ".join((path, *headers.values()))
        assert canonical(body) == canonical(expected_request(recording, exchange, backend, is_streamed=is_streamed))
    assert canonical(outcome) == canonical(expected_outcome(recording, backend, is_streamed=is_streamed))


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
