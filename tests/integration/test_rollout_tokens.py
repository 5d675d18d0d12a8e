"""Rollouts record exact tokens: those that the engine was sent, and those that it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from broker.contract import (
    AgentSpec,
    AmortizedForgettingCondenserSpec,
    Limits,
    ModelCallFailed,
    ModelReply,
    Observation,
    SegmentStarted,
    TokenRecord,
)
from broker.runtime import CorruptEntry
from deckhands.client import Change, Segment, Trajectory
from deckhands.rollouts import StubEngine, serve_stub
from deckhands.rollouts.stub_engine import AmbiguousTokenizer, logprob_of
from tests.faults.harness import FaultCluster
from tests.polling import unhurried, until
from tests.rollout_parts import Rollouts

APIS = ("chat", "chat_tokens", "completions")
AGENT = AgentSpec(enable_workspace_skills=False)


async def run(rollouts: Rollouts, **task: Any) -> Trajectory:
    """Run a conversation, and return its tokens."""
    task.setdefault("agent", AGENT)
    cid = await rollouts.client.submit("Do it.", **task)
    await rollouts.client.watcher.wait(cid)
    return await rollouts.client.trajectory(cid)


@pytest_asyncio.fixture
async def rollouts(tmp_path: Path) -> AsyncIterator[Rollouts]:
    engine = StubEngine(tool="think")
    async with serve_stub(engine) as address, FaultCluster(tmp_path).running() as cluster:
        yield Rollouts(cluster, engine, address)


@pytest.mark.parametrize("api", APIS)
async def test_recorded_tokens_are_those_of_the_engine(rollouts: Rollouts, api: str) -> None:
    rollouts.start(api)
    trajectory = await run(rollouts, rollout=True)
    replies = [reply for segment in trajectory.segments for reply in segment.replies]
    assert len(replies) == 4
    for segment in trajectory.segments:
        assert len(rollouts.find_truth(segment)) == len(segment.replies)
        at = {place for reply in segment.replies for place in range(reply.start, reply.end)}
        assert segment.mask.tolist() == [int(place in at) for place in range(len(segment.tokens))]
        assert {segment.versions[place] for place in at} == {0}
        assert all(segment.logprobs[place] == logprob_of(segment.tokens[place], 0) for place in at)
    assert trajectory.sampled == sum(len(row["tokens"]) for row in rollouts.engine.truth)
    if api == "chat":  # the server tokenizes text again, and the log names each break
        first, *breaks = [segment.reason for segment in trajectory.segments]
        assert (first, set(breaks) - {"retokenized"}) == ("", set())
    else:
        assert [segment.reason for segment in trajectory.segments] == [""]
    tokenizer = rollouts.engine.tokenizer
    assert any(
        tokenizer.encode(tokenizer.decode(row["tokens"])) != row["tokens"][:-1] for row in rollouts.engine.truth
    ), "the tokenizer is not ambiguous"


@pytest.mark.parametrize("api", APIS)
async def test_requests_name_their_conversation_in_the_header(rollouts: Rollouts, api: str) -> None:
    rollouts.start(api, LLM_SESSION_HEADER="X-Session-ID")
    found = [await run(rollouts, rollout=is_rollout) for is_rollout in (True, True, False)]
    sessions = [row["session"] for row in rollouts.engine.truth]
    assert sessions == [one.conversation_id for one in found for _ in range(4)]


async def test_a_break_is_an_event_that_names_its_reply(rollouts: Rollouts) -> None:
    rollouts.start("chat")
    trajectory = await run(rollouts, rollout=True)
    events = await rollouts.client.events(trajectory.conversation_id)
    breaks = [event for event in events if isinstance(event, SegmentStarted)]
    assert [one.reply_id for one in breaks] == [segment.replies[0].event_id for segment in trajectory.segments[1:]]


async def test_a_condensation_starts_a_segment(rollouts: Rollouts) -> None:
    rollouts.engine.turns = 12
    rollouts.start("completions")
    agent = AGENT.model_copy(update={"condenser": AmortizedForgettingCondenserSpec(max_size=20, keep_first=2)})
    trajectory = await run(rollouts, rollout=True, agent=agent)
    assert {segment.reason for segment in trajectory.segments[1:]} == {"condensation"}
    assert len(trajectory.segments) > 1
    assert sum(len(rollouts.find_truth(one)) for one in trajectory.segments) == sum(
        len(one.replies) for one in trajectory.segments
    )


async def start_slowly(rollouts: Rollouts, **task: Any) -> str:
    """Start a conversation whose engine is slow enough to change something, and wait for its second reply."""
    rollouts.engine.turns, rollouts.engine.seconds_per_token = 4, 0.01
    rollouts.start("completions")
    cid = await rollouts.client.submit("Do it.", agent=AGENT, rollout=True, **task)
    await until(lambda: len(rollouts.engine.truth) == 2, what="second reply")
    return cid


async def check_segments(rollouts: Rollouts, cid: str, *reasons: str) -> list[Segment]:
    """Wait for the end, and check that the log and the trajectory name these breaks, each with the engine's tokens."""
    rollouts.engine.seconds_per_token = 0
    await rollouts.client.watcher.wait(cid)
    summary = await rollouts.client.summary(cid)
    assert summary.state == "finished", summary
    segments = (await rollouts.client.trajectory(cid)).segments
    assert [segment.reason for segment in segments] == list(reasons)
    events = [one for one in await rollouts.client.events(cid) if isinstance(one, SegmentStarted)]
    assert [one.reason for one in events] == [reason for reason in reasons if reason]
    assert [one.reply_id for one in events] == [segment.replies[0].event_id for segment in segments if segment.reason]
    assert all(len(rollouts.find_truth(segment)) == len(segment.replies) for segment in segments)
    return segments


async def test_another_model_starts_a_segment(rollouts: Rollouts) -> None:
    cid = await start_slowly(rollouts)
    await rollouts.client.change(cid, Change(), model="openai/other")
    await check_segments(rollouts, cid, "", "model_changed")


async def test_other_tools_start_a_segment(rollouts: Rollouts) -> None:
    cid = await start_slowly(rollouts)
    await rollouts.client.change(cid, Change(agent=AGENT.model_copy(update={"enable_cmd": False})))
    await check_segments(rollouts, cid, "", "history_changed")


async def test_a_rollback_starts_a_segment(rollouts: Rollouts) -> None:
    cid = await start_slowly(rollouts, double_texting="rollback")
    await rollouts.client.send_message(cid, "Do another thing.")
    (segment,) = await check_segments(rollouts, cid, "rollback")  # what was taken back is no part of the trajectory
    text = rollouts.engine.tokenizer.decode(segment.tokens.tolist())
    assert "Do another thing." in text
    assert "Do it." not in text


async def test_replies_without_tokens_before_are_named(rollouts: Rollouts) -> None:
    rollouts.start("completions")
    before = await run(rollouts)
    (created, *events) = await rollouts.client.events(before.conversation_id)
    reply = next(at for at, event in enumerate(events) if isinstance(event, ModelReply))
    first = next(at for at, event in enumerate(events) if at > reply and isinstance(event, Observation))
    # As an earlier version of a worker leaves it, which recorded no tokens.
    part = created.model_copy(update={"conversation_id": "continued", "rollout": True})
    await rollouts.client.log.create_from(part, events[: first + 1], key="continued")
    await check_segments(rollouts, "continued", "not_recorded")


class ForgetfulTokenizer(AmbiguousTokenizer):
    """A chat template that leaves out the text of a reply when messages follow it, as templates do with thoughts."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, is_open: bool) -> list[int]:
        last = len(messages) - 1
        shown = [
            {**message, "content": ""} if message["role"] == "assistant" and at < last else message
            for at, message in enumerate(messages)
        ]
        return super().render(shown, tools, is_open=is_open)


@pytest.mark.parametrize("api", ["chat_tokens", "completions"])
async def test_a_template_that_changes_replies_starts_segments(rollouts: Rollouts, api: str) -> None:
    rollouts.engine.tokenizer = ForgetfulTokenizer()
    rollouts.start(api)
    trajectory = await run(rollouts, rollout=True)
    assert [segment.reason for segment in trajectory.segments] == ["", "template", "template", "template"]
    events = await rollouts.client.events(trajectory.conversation_id)
    assert [one.reason for one in events if isinstance(one, SegmentStarted)] == ["template"] * 3
    assert all(len(rollouts.find_truth(segment)) == len(segment.replies) == 1 for segment in trajectory.segments)


class PairedEngine(StubEngine):
    """An engine that answers `/tokenize` for a later turn only while the other request for this turn is there, too."""

    async def _tokenize(self, request: web.Request) -> web.Response:
        first, *_, last = (await request.json())["messages"]
        if first["content"] == "?" and last["content"] not in ("A", "7"):  # these are asked once, for all turns
            await self.pair.wait()
        return await super()._tokenize(request)

    def __init__(self, turns: int) -> None:
        super().__init__(turns=turns, tool="think")
        self.pair = asyncio.Barrier(2)


async def test_a_turn_waits_for_one_round_trip_of_tokenize(tmp_path: Path) -> None:
    engine = PairedEngine(turns=3)
    async with serve_stub(engine) as address, FaultCluster(tmp_path).running() as cluster:
        paired = Rollouts(cluster, engine, address)
        paired.start("completions")
        async with asyncio.timeout(unhurried(60)):
            trajectory = await run(paired, rollout=True)
    (segment,) = trajectory.segments
    assert len(paired.find_truth(segment)) == len(segment.replies) == 4


async def test_without_rollout_nothing_is_recorded(rollouts: Rollouts) -> None:
    rollouts.start("chat_tokens")
    trajectory = await run(rollouts)
    assert trajectory.segments == []
    events = await rollouts.client.events(trajectory.conversation_id)
    replies = [event for event in events if isinstance(event, ModelReply)]
    assert replies
    assert all("tokens" not in event.wire() and "blobs" not in event.wire() for event in replies)
    assert "rollout" not in events[0].wire()


async def test_a_server_without_tokens_is_refused(rollouts: Rollouts) -> None:
    rollouts.cluster.start_controller("c1")
    model = rollouts.cluster.script({"text": "hello"})
    cid = await rollouts.client.submit("Do it.", agent=AGENT, model=model, rollout=True)
    await rollouts.client.watcher.wait(cid)
    summary = await rollouts.client.summary(cid)
    assert (summary.state, summary.error_code) == ("error", "tokens_missing")


async def test_an_aborted_reply_continues_from_its_own_tokens(rollouts: Rollouts) -> None:
    engine = rollouts.engine
    engine.turns, engine.seconds_per_token = 0, 0.02
    rollouts.start("completions")
    cid = await rollouts.client.submit("Do it.", agent=AGENT, rollout=True)
    await until(lambda: engine.in_flight, what="reply in flight")
    for version in (1, 2):
        async with engine.policy.changed:
            engine.policy.aborts += 1
            engine.policy.is_paused = True
            engine.policy.changed.notify_all()
        await until(lambda: len(engine.truth) == version, what="aborted reply")  # noqa: B023  (awaited here)
        async with engine.policy.changed:
            engine.policy.version, engine.policy.is_paused = version, False
            engine.policy.changed.notify_all()
        await until(lambda: engine.in_flight, what="continued reply")
    engine.seconds_per_token = 0
    await rollouts.client.watcher.wait(cid)
    (segment,) = (await rollouts.client.trajectory(cid)).segments
    (reply,) = segment.replies
    sampled = segment.tokens[reply.start : reply.end].tolist()
    assert sampled == [token for row in engine.truth for token in row["tokens"]]
    assert segment.versions[reply.start : reply.end].tolist() == [v for row in engine.truth for v in row["versions"]]
    (event,) = [event for event in await rollouts.client.events(cid) if isinstance(event, ModelReply)]
    assert event.tokens is not None
    assert event.tokens.max_version == 2


async def test_the_length_of_a_reply_is_limited(rollouts: Rollouts) -> None:
    rollouts.start("completions", LLM_MAX_OUTPUT_TOKENS="20")
    cid = await rollouts.client.submit("Do it.", agent=AGENT, rollout=True, limits=Limits(max_iterations=1))
    await rollouts.client.watcher.wait(cid)
    assert {len(row["tokens"]) for row in rollouts.engine.truth} == {20}


async def test_a_length_that_is_not_known_is_named(rollouts: Rollouts) -> None:
    rollouts.engine.max_model_len = None
    rollouts.start("completions")
    cid = await rollouts.client.submit("Do it.", agent=AGENT, rollout=True)
    await rollouts.client.watcher.wait(cid)
    summary = await rollouts.client.summary(cid)
    assert (summary.state, summary.error_code) == ("error", "llm_config")
    failed = [one for one in await rollouts.client.events(cid) if isinstance(one, ModelCallFailed)]
    assert "LLM_MAX_OUTPUT_TOKENS" in failed[-1].content


async def test_another_worker_continues_the_recorded_tokens(rollouts: Rollouts) -> None:
    engine = rollouts.engine
    engine.turns, engine.seconds_per_token = 3, 0.005
    rollouts.start("completions")
    cid = await rollouts.client.submit("Do it.", agent=AGENT, rollout=True)
    await until(lambda: len(engine.truth) == 2, what="second reply")
    rollouts.cluster.kill("c1")
    rollouts.start("completions")
    await rollouts.client.watcher.wait(cid)
    (segment,) = (await rollouts.client.trajectory(cid)).segments
    assert len(segment.replies) == 4
    assert {row["tokens"][-1] for row in rollouts.find_truth(segment)} == {2}


async def test_a_fork_keeps_the_tokens_of_its_origin(rollouts: Rollouts) -> None:
    rollouts.start("completions")
    trajectory = await run(rollouts, rollout=True)
    at = trajectory.segments[0].replies[1].event_id
    fork = await rollouts.client.fork(trajectory.conversation_id, at=at, is_held=True)
    shared = await rollouts.client.trajectory(fork)
    end = trajectory.segments[0].replies[1].end
    assert shared.segments[0].tokens == trajectory.segments[0].tokens[:end]


@pytest.mark.parametrize("content", [b"", b"DTK1", b"DTK1" + bytes(12) + b"x", b"DTK1" + b"\xff" * 12])
def test_a_damaged_record_is_reported(content: bytes) -> None:
    with pytest.raises(CorruptEntry):
        TokenRecord.from_bytes(content)


async def test_a_trajectory_survives_json() -> None:
    record = TokenRecord.from_bytes(TokenRecord().to_bytes())
    segment = Segment()
    segment.add(3, record)
    whole = Trajectory("c", [segment])
    assert Trajectory.from_json(whole.as_json()) == whole
    await asyncio.sleep(0)
