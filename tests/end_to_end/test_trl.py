"""`GRPOTrainer` of the installed TRL, trained on rollouts of a cluster, with llama.cpp as the engine of its policy."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests import llama_parts
from tests.faults.harness import FaultCluster
from tests.llama_parts import make_environment, serve_llama
from tests.polling import unhurried

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/trl-venv/bin/python"
pytestmark = [
    pytest.mark.skipif(not llama_parts.PYTHON.exists(), reason=llama_parts.MISSING),
    pytest.mark.skipif(not PYTHON.exists(), reason="run benchmarks/peer/trl.sh to install TRL (3 GB)"),
    pytest.mark.timeout(1200),
]
STEPS, PROMPTS, COMPLETIONS = 2, 2, 3
CALLS = r"""
root ::= ([a-t] " <function=think>\n<parameter=thought>" | [u-z] " <function=finish>\n<parameter=message>") rest
rest ::= [a-z ]{1,30} "</parameter>\n</function>"
"""
"""A reply is a call. It is more often a thought than the end of the work."""
REWARDS = """
def length(attempt):
    return {"reward": float(sum(len(str(turn)) for turn in attempt.turns) % 7)}
"""


async def train(cluster: FaultCluster, folder: Path) -> dict[str, Any]:
    """Run the program, and return its result."""
    (folder / "rewards.py").write_text(REWARDS)
    environment = {
        **os.environ,
        "DECKHANDS_URL": cluster.url_for_workers or cluster.store.url,
        "DECKHANDS_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with (folder / "trl.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "tests.trl_program", folder, str(STEPS)), env=environment, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            async with asyncio.timeout(unhurried(300)):
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert code == 0, (folder / "trl.log").read_text()[-5000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


async def test_a_trainer_learns_from_rollouts(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    with serve_llama(folder) as address:
        async with FaultCluster(tmp_path).running() as cluster:
            settings = {"LLM_COMPLETION_KWARGS": json.dumps({"grammar": CALLS})}
            cluster.start_controller("c1", **make_environment(address), **settings)
            result = await train(cluster, folder)
            for call in result["calls"]:
                for at, name in enumerate(call["conversation_id"]):
                    (segment,) = (await cluster.client.trajectory(name)).segments
                    assert segment.tokens.tolist() == call["prompt_ids"][at] + call["completion_ids"][at]
    calls = result["calls"]
    assert [call["step"] for call in calls] == list(range(STEPS))
    for call in calls:
        assert len(call["prompts"]) == PROMPTS * COMPLETIONS, "TRL names a prompt once for each completion"
        assert len(set(call["conversation_id"])) == PROMPTS * COMPLETIONS
        for mask, logprobs in zip(call["env_mask"], call["logprobs"], strict=True):
            assert all(is_sampled or one == 0 for is_sampled, one in zip(mask, logprobs, strict=True))
            known = [one for is_sampled, one in zip(mask, logprobs, strict=True) if is_sampled and one is not None]
            assert known
            assert all(one < 0 for one in known), "an unknown log-probability is not that of a certain token"
    assert any(0 in mask for call in calls for mask in call["env_mask"]), "no result of a tool is between two replies"
    # The model that TRL trains is the engine's: it gives the recorded log-probabilities to the recorded tokens.
    assert 0 < calls[0]["difference"] < 1e-2
    steps = [row for row in result["log"] if "reward" in row]
    assert len(steps) == STEPS
    for call, row in zip(calls, steps, strict=True):
        rewards = call["reward"]
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["completions/mean_length"] == pytest.approx(
            sum(sum(mask) for mask in call["env_mask"]) / len(rewards)
        )
        assert math.isfinite(row["loss"])
    assert any(row["grad_norm"] > 0 for row in steps)
    assert result["changed"] == result["parameters"]
