"""verifiers for `rollout_kills`: a run of its one process, killed in the middle, and called again with `--resume`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster import ROOT
from benchmarks.eval_figures import Line
from deckhands.rollouts import serve_stub

if TYPE_CHECKING:
    from benchmarks.rollout_kills import Engine

PYTHON = ROOT / "build" / "verifiers-venv" / "bin" / "python"
MAIN = "import sys; from verifiers.v1.cli.eval.main import main; sys.exit(main())"
POLL_SECONDS = 0.1
LIMIT_SECONDS = 1_800.0


async def measure_peer(directory: Path, engine: Engine, count: int, group_size: int) -> list[Line]:
    """Return what one kill costs `count` rollouts of verifiers at an engine with as many slots as ours had."""
    if not PYTHON.exists() and subprocess.run([ROOT / "benchmarks/peer/verifiers.sh"], check=False).returncode:
        return [Line("verifiers", "not installed")]
    needed = count * (engine.turns + 1)
    log = directory / "verifiers.log"
    async with serve_stub(engine) as address:
        began = time.monotonic()
        first = await _start(directory, log, *_list_options(address, engine, count, group_size))
        while first.returncode is None and engine.replies < needed // 2:
            await asyncio.sleep(POLL_SECONDS)
        if first.returncode is not None:
            return [Line("verifiers", f"has ended early: {log.read_text()[-300:]}")]
        first.kill()
        await first.wait()
        made, kept = engine.replies, len(_read_traces(directory))
        await asyncio.sleep(engine.reply_seconds)  # replies in flight end, and no program reads them
        (saved,) = directory.glob("out/**/eval.json")
        second = await _start(directory, log, "@", str(saved), "--resume")
        async with asyncio.timeout(LIMIT_SECONDS):
            if await second.wait():
                return [Line("verifiers", f"cannot resume: {log.read_text()[-300:]}")]
        seconds = time.monotonic() - began
    kept_replies = kept * (engine.turns + 1)
    return [
        Line("verifiers: trajectories kept at the kill", kept, f"of {count:,}"),
        Line("verifiers: replies lost with its process", made - kept_replies, f"of {made:,} made so far"),
        Line("verifiers: trajectories after it was called again", len(_read_traces(directory)), f"of {count:,}"),
        Line("verifiers: replies that were made and not used", round(100 * (engine.replies / needed - 1), 1), "%"),
        Line("verifiers: wall", round(seconds, 1), "s"),
    ]


def _list_options(address: str, engine: Engine, count: int, group_size: int) -> list[str]:
    return [
        *("verifiers-loop", "--env.taskset.count", str(count // group_size), "-m", "stub", "-r", str(group_size)),
        *("--client.base-url", f"{address}/v1", "--client.api-key-var", "STUB_KEY"),
        *("--env.agent.harness.id", "verifiers-loop", "--env.agent.harness.turns", str(engine.turns)),
        *("--env.agent.runtime.type", "subprocess", "--no-push", "--no-rich", "-c", str(2 * engine.slots.count)),
        *("-o", "out", "--run.dir", "run"),
    ]


async def _start(directory: Path, log: Path, *arguments: str) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "STUB_KEY": "none",
        "HOME": str(directory),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            str(PYTHON), *("-c", MAIN, *arguments), env=environment, cwd=directory, stdout=out, stderr=out
        )


def _read_traces(directory: Path) -> list[dict[str, Any]]:
    """Return the rollouts that were saved without an error."""
    episodes = []
    for path in directory.glob("out/**/traces.jsonl"):
        for line in path.read_text().splitlines():
            try:
                episodes.append(json.loads(line))
            except ValueError:  # the kill has cut the line off
                continue
    return [trace for one in episodes for trace in one.get("traces", [one]) if trace.get("ok")]
