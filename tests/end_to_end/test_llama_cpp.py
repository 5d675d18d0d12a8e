"""A group of rollouts whose policy is a real llama.cpp server, with a tiny model of random weights."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from broker.contract import ModelCallFailed, ModelReply
from deckhands.client import Segment
from deckhands.rollouts import Group, RolloutRun, RolloutSpec
from tests.faults.harness import FaultCluster
from tests.llama_parts import MISSING, MODEL, PYTHON, force_call, make_environment, serve_llama
from tests.rollout_parts import make_prompts

pytestmark = [pytest.mark.skipif(not PYTHON.exists(), reason=MISSING), pytest.mark.timeout(600)]
GROUP_SIZE = 4
THINK, FINISH = force_call("think", "thought"), force_call("finish", "message")
IM_END = "<|im_end|>"
WHOLE_VOCABULARY = 10_000


class Engine:
    """The server, behind a proxy that keeps what the workers ask and what the server answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.proxy = ""
        self.completions: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.renderings: list[tuple[dict[str, Any], str]] = []
        self.sessions: set[str] = set()
        self.session: aiohttp.ClientSession

    async def post(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(self.address + path, json=fields) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def tokenize(self, text: str) -> list[int]:
        fields = {"content": text, "add_special": True, "parse_special": True}
        return list((await self.post("/tokenize", fields))["tokens"])

    async def pass_on(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.sessions.add(request.headers.get("X-Session-ID", ""))
        async with self.session.post(self.address + request.path, json=asked) as answer:
            body = await answer.read()
            if request.path == "/completion" and answer.status == 200:
                self.completions.append((asked, json.loads(body)))
            if request.path == "/apply-template":
                self.renderings.append((asked, json.loads(body)["prompt"]))
            return web.Response(body=body, status=answer.status, content_type="application/json")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_llama(tmp_path_factory.mktemp("llama")) as found:
        yield found


@pytest_asyncio.fixture
async def engine(address: str) -> AsyncIterator[Engine]:
    engine = Engine(address)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", engine.pass_on)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.proxy = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as engine.session:
        yield engine
        await runner.cleanup()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path).running() as found:
        yield found


def start_worker(cluster: FaultCluster, engine: Engine, **more: str) -> None:
    cluster.start_controller("c1", **{**make_environment(engine.proxy), **more})


async def run_group(cluster: FaultCluster, folder: Path, **fields: Any) -> Group:
    spec = {"prompts": make_prompts(1), "model": MODEL, "group_size": GROUP_SIZE, **fields}
    run = await RolloutRun.start(cluster.client, RolloutSpec.parse(spec), directory=folder / "run")
    async for group in run.groups():
        await group.ack()
        return group
    raise AssertionError("the run has no group")


def find_answers(engine: Engine, segment: Segment) -> list[dict[str, Any]]:
    """Return the server's answers that are the replies of a segment; each request had the tokens before its reply."""
    tokens = segment.tokens.tolist()
    found = []
    for reply in segment.replies:
        answers = [
            answer
            for asked, answer in engine.completions
            if asked["prompt"] == tokens[: reply.start] and answer["tokens"] == tokens[reply.start : reply.end]
        ]
        assert answers, "the server was not sent these tokens, or has not sampled these"
        assert answers[0]["tokens_evaluated"] == reply.start
        found.append(answers[0])
    return found


async def check_tokens(engine: Engine, segment: Segment) -> None:
    """Compare a segment with the server: its prompts, its replies, and its log-probabilities."""
    tokens = segment.tokens.tolist()
    answers = find_answers(engine, segment)
    sampled = {at for reply in segment.replies for at in range(reply.start, reply.end)}
    assert segment.mask.tolist() == [int(at in sampled) for at in range(len(tokens))]
    assert {segment.versions[at] for at in sampled} == {-1}
    first = answers[0]["prompt"]
    assert first in [text for _, text in engine.renderings], "the first prompt is no rendering of the server"
    assert await engine.tokenize(first) == tokens[: segment.replies[0].start]
    for reply, answer in zip(segment.replies, answers, strict=True):
        reported = [one["logprob"] for one in answer["completion_probabilities"]]
        known = [one for one in segment.logprobs[reply.start : reply.end] if not math.isnan(one)]
        assert known
        assert all(any(math.isclose(one, other, rel_tol=1e-5) for other in reported) for one in known)
    known_at = [at for at in sorted(sampled) if not math.isnan(segment.logprobs[at])]
    for at in (known_at[0], known_at[len(known_at) // 2], known_at[-1]):  # asks the server again
        fields = {"prompt": tokens[:at], "n_predict": 1, "n_probs": WHOLE_VOCABULARY, "temperature": 1}
        (place,) = (await engine.post("/completion", fields))["completion_probabilities"]
        (expected,) = [one["logprob"] for one in place["top_logprobs"] if one["id"] == tokens[at]]
        assert segment.logprobs[at] == pytest.approx(expected, abs=1e-3)


async def test_a_group_has_the_tokens_of_the_server(cluster: FaultCluster, engine: Engine, tmp_path: Path) -> None:
    start_worker(cluster, engine, LLM_MAX_OUTPUT_TOKENS="40", LLM_SESSION_HEADER="X-Session-ID")
    group = await run_group(cluster, tmp_path)
    assert len(group.rollouts) == GROUP_SIZE
    for rollout in group.rollouts:
        (segment,) = rollout.trajectory.segments
        await check_tokens(engine, segment)
    used = [answer["generation_settings"] for _, answer in engine.completions]
    assert {(one["temperature"], one["top_k"], one["top_p"], one["min_p"]) for one in used} == {(1, 0, 1, 0)}
    assert engine.sessions == {rollout.trajectory.conversation_id for rollout in group.rollouts}
    texts = [answer["content"] for _, answer in engine.completions]
    sampled = [answer["tokens"] for _, answer in engine.completions]
    again = [await engine.tokenize(text) for text in texts]
    assert any(tokens[:-1] != other for tokens, other in zip(sampled, again, strict=True)), "nothing is ambiguous"


@pytest.mark.parametrize(
    ("grammar", "count", "has_stop_word"),
    [(THINK, 3, False), (THINK, 3, True), (FINISH, 1, False)],
    ids=["think", "think-stop-word", "finish"],
)
async def test_turns_extend_the_recorded_tokens(
    cluster: FaultCluster, engine: Engine, tmp_path: Path, grammar: str, count: int, *, has_stop_word: bool
) -> None:
    settings = {"LLM_COMPLETION_KWARGS": json.dumps({"grammar": grammar})}
    start_worker(cluster, engine, **settings, LLM_DISABLE_STOP_WORD=str(not has_stop_word))
    group = await run_group(cluster, tmp_path, max_iterations=3)
    (end,) = await engine.tokenize(IM_END)
    assert len(group.rollouts) == GROUP_SIZE
    for rollout in group.rollouts:
        (segment,) = rollout.trajectory.segments
        await check_tokens(engine, segment)
        events = await cluster.client.events(rollout.trajectory.conversation_id)
        replies = [event for event in events if isinstance(event, ModelReply)]
        assert [one.event_id for one in segment.replies] == [reply.id for reply in replies]
        assert all(reply.tool_calls for reply in replies)
        assert len(replies) == count
        assert rollout.is_partial == (grammar is THINK)
        last = [segment.tokens[reply.end - 1] for reply in segment.replies]
        assert has_stop_word != (set(last) == {end})
        for before, after in pairwise(segment.replies):  # between them is what the template puts there
            between = segment.tokens[before.end : after.start].tolist()
            ends = [*segment.tokens[before.start : before.end].tolist(), *between].count(end)
            assert ends == 2, "a reply or a message has no end, or two"


async def test_the_protocol_of_other_servers_is_refused(cluster: FaultCluster, engine: Engine) -> None:
    start_worker(cluster, engine, LLM_ROLLOUT_API="completions")
    cid = await cluster.client.submit("Do it.", rollout=True)
    await cluster.client.watcher.wait(cid)
    summary = await cluster.client.summary(cid)
    assert (summary.state, summary.error_code) == ("error", "tokens_missing")
    failed = [one for one in await cluster.client.events(cid) if isinstance(one, ModelCallFailed)]
    assert "LLM_ROLLOUT_API=llama_cpp" in failed[-1].content
    assert not engine.completions
