"""A workspace host or its node dies: each action has one observation, unknown outcomes are named, nothing is run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, Event, LLMSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation, OutcomeUnknownObservation
from tests.browser_parts import opened_site
from tests.faults.harness import FaultCluster
from tests.turns import bash, call, finish
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

START_LIMIT_SECONDS = 180.0
FILES_OF_PATCH, LINES_OF_FILE = 40, 200


def kill_host(cluster: FaultCluster, conversation_id: str) -> None:
    """End the process that owns the workspace's shell, kernel and browser, as the kernel would."""
    pid = HostFolder(cluster.root / "n", conversation_id).read_main_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def text_of(event: Event) -> str:
    return str(getattr(event, "content", ""))


async def test_a_host_that_dies_with_a_command(cluster: FaultCluster) -> None:
    trace = cluster.root / "trace"
    waits = f"echo begun >> {trace}; sleep 1000; echo ended >> {trace}"
    cluster.start()
    (cid,) = await cluster.submit([bash(waits), bash(f"echo next >> {trace}; echo ok"), finish()])
    await cluster.until(trace.exists, what="the command")
    kill_host(cluster, cid)
    await cluster.settle([cid])
    unknown, after = await cluster.answers(cid)
    assert isinstance(unknown, OutcomeUnknownObservation)
    assert "Check before you repeat it" in unknown.content
    assert "ok" in text_of(after)
    assert lines(trace) == ["begun", "next"]


async def test_a_host_that_dies_with_a_patch(cluster: FaultCluster) -> None:
    """Each file is old or new in whole, the model reads that the outcome is unknown, and nothing is applied twice."""
    changed_first = FILES_OF_PATCH // 2
    old, new = "old\n" * LINES_OF_FILE, "new\n" + "old\n" * (LINES_OF_FILE - 1)
    cluster.start()
    patch = "".join(f"*** Update File: {number}\n@@\n-old\n+new\n old\n" for number in range(FILES_OF_PATCH))
    make = f'python3 -c \'for n in range({FILES_OF_PATCH}): open(str(n), "w").write("old\\n" * {LINES_OF_FILE})\''
    patching = call("apply_patch", patch=f"*** Begin Patch\n{patch}*** End Patch\n")
    turns = [bash(make, timeout=60), patching, bash("echo after"), finish()]
    (cid,) = await cluster.submit(turns, latency=0.5, enable_patch=True)
    folder = cluster.folder_of(cid)
    watched = folder / str(changed_first)

    def is_begun() -> bool:
        return watched.exists() and watched.read_text().startswith("new")

    await cluster.until(is_begun, what="the first files of the patch")
    kill_host(cluster, cid)
    await cluster.settle([cid])
    made, unknown, after = await cluster.answers(cid)
    texts = [(folder / str(number)).read_text() for number in range(FILES_OF_PATCH)]
    assert set(texts) <= {old, new}
    assert "Check before you repeat it" in text_of(unknown) or "Success" in text_of(unknown)
    assert isinstance(unknown, OutcomeUnknownObservation) == ("Success" not in text_of(unknown))
    assert texts[: changed_first + 1] == [new] * (changed_first + 1)
    assert texts == sorted(texts)  # the files are changed in the order of the patch, and then no more
    assert text_of(made).count("old") == 0
    assert "after" in text_of(after)


async def test_a_host_that_dies_with_a_cell(cluster: FaultCluster) -> None:
    trace = cluster.root / "trace"
    cluster.start_controller()
    cluster.start_tool(DECKHANDS_POOLS="bash,ipython")
    write = "print({!r}, file=open({!r}, 'a'), flush=True)"
    waits = f"import time; {write.format('begun', str(trace))}; time.sleep(1000)"
    after = f"{write.format('next', str(trace))}; print(41 + 1)"
    turns = [call("execute_ipython_cell", code=code) for code in (waits, after)]
    (cid,) = await cluster.submit([*turns, finish()], enable_jupyter=True)
    await cluster.until(trace.exists, what="the cell", limit=START_LIMIT_SECONDS)
    kill_host(cluster, cid)
    await cluster.settle([cid], limit=START_LIMIT_SECONDS)
    unknown, shown = await cluster.answers(cid)
    assert isinstance(unknown, OutcomeUnknownObservation)
    assert "42" in text_of(shown)
    assert lines(trace) == ["begun", "next"]


@pytest.mark.slow
async def test_a_host_that_dies_with_a_page(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        site.page("/never", "<h1>Never</h1>")
        url = site.page("/order", "<h1>Orders</h1>")
        cluster.start_controller()
        cluster.start_tool(DECKHANDS_POOLS="bash,browser")
        turns = [call("browser", code=f"goto('{address}')") for address in (site.url("/never"), url)]
        (cid,) = await cluster.submit([*turns, finish()], enable_browsing=True)
        await cluster.until(site.held.is_set, what="the page", limit=START_LIMIT_SECONDS)
        kill_host(cluster, cid)
        site.released.set()
        await cluster.settle([cid], limit=START_LIMIT_SECONDS)
        unknown, shown = await cluster.answers(cid)
        assert isinstance(unknown, OutcomeUnknownObservation)
        assert "heading 'Orders'" in text_of(shown)
        assert [asked for asked in site.asked if asked in ("/never", "/order")] == ["/never", "/order"]


async def end(root: Path, conversation_id: str) -> None:
    """End a workspace's processes, as the end of its machine does."""
    workspaces = Workspaces(root, sandbox="none")
    await workspaces.close(conversation_id)
    await workspaces.aclose()


async def test_the_conversation_goes_on_at_another_node_with_its_files(tmp_path: Path) -> None:
    cluster = FaultCluster(tmp_path)
    roots = {name: tmp_path / name for name in ("n1", "n2")}
    gate = tmp_path / "gate"

    def start(node: str) -> None:
        cluster.start_tool(
            node,
            DECKHANDS_NODE=node,
            DECKHANDS_NODE_DIR=str(roots[node]),
            DECKHANDS_CHECKPOINTS=f"file://{tmp_path}/checkpoints",
            DECKHANDS_CHECKPOINT_EVERY="1",
            DECKHANDS_NODE_LOST_SECONDS="4",
        )

    turns = [
        bash("echo first > file"),
        bash(f"while [ ! -e {gate} ]; do sleep 0.1; done; echo ran >> {tmp_path}/effects"),
        bash("cat file"),
        bash("echo second >> file; cat file"),
        finish(),
    ]
    async with cluster.running():
        cluster.start_controller()
        start("n1")
        agent = AgentSpec(llm=LLMSpec(model=cluster.script(*turns)))
        conversation_id = await cluster.client.submit("do it", agent=agent)
        await cluster.until_kind(conversation_id, "action.run", count=2)
        await cluster.until(lambda: HostFolder(roots["n1"], conversation_id).is_alive)
        # A workspace is saved after the result of its action is recorded.
        await cluster.until((tmp_path / "checkpoints" / "checkpoints" / conversation_id).exists)
        cluster.kill("n1")
        await end(roots["n1"], conversation_id)
        start("n2")
        await cluster.settle([conversation_id])
        events = await cluster.client.events(conversation_id)
        row = await cluster.client.row(conversation_id)
        assert (row.state, row.node) == ("finished", "n2")
        outputs = [event.content for event in events if isinstance(event, CmdOutputObservation)]
        assert outputs[-2:] == ["first", "first\nsecond"]
        (lost,) = [event for event in events if isinstance(event, ErrorObservation)]
        assert lost.error_id == "workspace_lost"
        assert "restored from the last checkpoint" in lost.content
        assert not (tmp_path / "effects").exists()
        assert (roots["n1"] / conversation_id / "workspace" / "file").read_text() == "first\n"
        await end(roots["n2"], conversation_id)
