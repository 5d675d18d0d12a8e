"""Workers that a person adds to the cluster of `deckhands up`, and a cluster beside another store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.command_line import deckhands, environment, read_until, started
from tests.polling import until
from tests.turns import call, finish, script


def is_offered(env: dict[str, str]) -> bool:
    return "add " in deckhands("tools", "--list", env=env).out


def test_a_tool_worker_joins_the_cluster_that_runs_here(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_SANDBOX="none")
    with started("up", "--tools", "0", "--sandbox", "none", env=environment(tmp_path)) as running:
        read_until(running, "Ctrl-C stops it")
        worker = {**env, "DECKHANDS_TOOLS": "tests.example_tools:add", "EXAMPLE_TOOLS_TRACE": str(tmp_path / "trace")}
        worker |= {"DECKHANDS_NODE": "joining", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with started("tools", env=worker):
            asyncio.run(until(lambda: asyncio.to_thread(is_offered, env), limit=60, what="the tool"))
            adding = call("add", first=2)
            model = script(tmp_path / "m.json", adding, finish("Done."))
            cid = deckhands("submit", "-t", "x", "--tool", "add", "--model", model, env=env).out.strip()
            followed = deckhands("logs", "-f", cid, env=env)
    assert followed.code == 0, followed
    assert "3" in followed.out.splitlines()[-2], followed


def test_a_worker_without_a_cluster_says_so(tmp_path: Path) -> None:
    for verb in ("tools", "controller"):
        done = deckhands(verb, env=environment(tmp_path))
        assert (done.code, "DECKHANDS_URL is not set, and no cluster is running here." in done.err) == (2, True), done


def test_a_cluster_beside_another_store_says_which_one_is_used(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_URL="unix:///nowhere/s")
    with started("up", "--tools", "0", "--controllers", "0", env=env) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("DECKHANDS_URL names another store: ")
