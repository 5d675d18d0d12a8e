"""Rollouts of `verifiers` as conversations: the installed package, its command, and a cluster with real workers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deckhands.evaluation import LABEL
from deckhands.rollouts import StubEngine, serve_stub
from tests.faults.harness import FaultCluster
from tests.polling import unhurried
from tests.rollout_parts import Rollouts, make_prompts

PYTHON = Path(__file__).parents[2] / "build/verifiers-venv/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="run benchmarks/peer/verifiers.sh to install verifiers"),
    pytest.mark.timeout(900),
]
RUN = "import sys; from verifiers.v1.cli.eval.main import main; sys.exit(main())"
GROUP = 2


@pytest_asyncio.fixture
async def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rollouts]:
    # One key for all processes, whose homes differ.
    key = base64.b64encode(bytes(32)).decode()
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", key)
    engine = StubEngine(turns=2, tool="think")
    async with serve_stub(engine) as address, FaultCluster(tmp_path).running() as cluster:
        found = Rollouts(cluster, engine, address)
        # Only the endpoints of rollouts answer: this address has no engine.
        found.address = "http://127.0.0.1:9"
        own = {"LLM_OWN_ENDPOINTS": '["http://127.0.0.1:*"]', "LLM_STREAM_REPLIES": "off"}  # the stub does not stream
        found.start("chat", DECKHANDS_SECRET_KEY=key, **own)
        found.address = address
        yield found


async def start(rollouts: Rollouts, folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start the command `vf-eval` for a dataset of two instances, with two rollouts of each."""
    rows = folder / "rows.jsonl"
    answers = ("the answer", "another")
    rows.write_text("".join(json.dumps({**row, "answer": answers[n]}) + "\n" for n, row in enumerate(make_prompts(2))))
    environment = {
        **os.environ,
        "DECKHANDS_URL": rollouts.cluster.url_for_workers or rollouts.cluster.store.url,
        "STUB_KEY": "none",
        "HOME": str(folder),
    }
    command = (
        *("-c", RUN, "deckhands-verifiers", "--env.taskset.dataset", str(rows), "-m", "stub", "-r", str(GROUP)),
        *("--client.base-url", f"{rollouts.address}/v1", "--client.api-key-var", "STUB_KEY"),
        *("--env.agent.harness.id", "deckhands-verifiers", "--env.agent.harness.policy", "openai/stub"),
        *("--env.agent.runtime.type", "subprocess", "--no-push", "--no-rich"),
        *("-o", str(folder / "out"), "--run.dir", "run", *arguments),
    )
    with (folder / "verifiers.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            str(PYTHON), *command, env=environment, cwd=folder, stdout=log, stderr=log
        )


def read_traces(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in (folder / "out").rglob("traces.jsonl")]
    episodes = [json.loads(line) for text in texts for line in text.splitlines()]
    return [trace for one in episodes for trace in one.get("traces", [one])]


async def test_rollouts_of_verifiers_are_conversations(rollouts: Rollouts, tmp_path: Path) -> None:
    process = await start(rollouts, tmp_path)
    async with asyncio.timeout(unhurried(150)):
        assert await process.wait() == 0, (tmp_path / "verifiers.log").read_text()
    traces = read_traces(tmp_path)
    log = (tmp_path / "verifiers.log").read_text()
    assert len(traces) == 2 * GROUP, log
    assert all(one["ok"] and len(one["calls"]) == 3 for one in traces), log
    rewards = {one["task"]["data"]["instance"]: one["rewards"]["check"] for one in traces}
    assert set(rewards) == {"prompt-0", "prompt-1"}
    ids = {one["info"]["deckhands"]["conversation_id"] for one in traces}
    rows = {row.conversation_id: row for row in await rollouts.client.recent(limit=100)}
    assert len(ids) == 2 * GROUP
    assert ids <= rows.keys()
    texts = str([one.wire() for name in ids for one in await rollouts.client.events(name)])
    assert "127.0.0.1" not in texts, "the log has the endpoint"
    assert {rows[one].labels[LABEL] for one in ids} == {f"vf-{one['id']}" for one in traces}
