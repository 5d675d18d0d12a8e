"""A workspace host is killed in the middle of an action: one observation, said to be unknown, nothing run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import Event, Observation
from broker.contract.observations import OutcomeUnknownObservation
from tests.browser_parts import opened_site
from tests.faults.harness import FaultCluster
from tool_worker.workspace.launch.host_folder import HostFolder

START_LIMIT_SECONDS = 180.0
FILES_OF_PATCH, LINES_OF_FILE = 40, 200


def kill_host(cluster: FaultCluster, conversation_id: str) -> None:
    """End the process that owns the workspace's shell, kernel and browser, as the kernel would."""
    pid = HostFolder(cluster.root / "n", conversation_id).read_main_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def script(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"tool_calls": [{"name": name, "arguments": given}]} for name, given in calls]
    return [*turns, {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}]


async def answers(cluster: FaultCluster, conversation_id: str) -> list[Observation]:
    """The one answer of each action that a host was asked for."""
    events = await cluster.client.events(conversation_id)
    found = []
    for action in [event for event in events if event.runnable]:
        (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
        found.append(answer)
    return found


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def text_of(event: Event) -> str:
    return str(getattr(event, "content", ""))


async def test_a_host_that_dies_with_a_command(cluster: FaultCluster) -> None:
    trace = cluster.root / "trace"
    waits = f"echo begun >> {trace}; sleep 1000; echo ended >> {trace}"
    cluster.start_controller()
    cluster.start_tool()
    calls = script(
        ("execute_bash", {"command": waits}), ("execute_bash", {"command": f"echo next >> {trace}; echo ok"})
    )
    (cid,) = await cluster.submit(calls)
    await cluster.until(trace.exists, what="the command")
    kill_host(cluster, cid)
    await cluster.settle([cid])
    unknown, after = await answers(cluster, cid)
    assert isinstance(unknown, OutcomeUnknownObservation)
    assert "Check before you repeat it" in unknown.content
    assert "ok" in text_of(after)
    assert lines(trace) == ["begun", "next"]


async def test_a_host_that_dies_between_two_commands(cluster: FaultCluster) -> None:
    """What it has answered stays known; the next command gets another host."""
    trace = cluster.root / "trace"
    cluster.start_controller()
    cluster.start_tool()
    calls = [("execute_bash", {"command": f"echo {n} >> {trace}; echo done {n}"}) for n in range(2)]
    turns = script(*calls)
    (cid,) = await cluster.submit(turns, latency=1.0)
    await cluster.until_kind(cid, "observation.run")
    kill_host(cluster, cid)
    await cluster.settle([cid])
    assert [text_of(answer).split()[-2:] for answer in await answers(cluster, cid)] == [["done", "0"], ["done", "1"]]
    assert lines(trace) == ["0", "1"]


@pytest.mark.parametrize("changed_first", [1, FILES_OF_PATCH // 2])
async def test_a_host_that_dies_with_a_patch(cluster: FaultCluster, changed_first: int) -> None:
    """Each file is old or new in whole, the model reads that the outcome is unknown, and nothing is applied twice."""
    old, new = "old\n" * LINES_OF_FILE, "new\n" + "old\n" * (LINES_OF_FILE - 1)
    cluster.start_controller()
    cluster.start_tool()
    patch = "".join(f"*** Update File: {number}\n@@\n-old\n+new\n old\n" for number in range(FILES_OF_PATCH))
    make = f'python3 -c \'for n in range({FILES_OF_PATCH}): open(str(n), "w").write("old\\n" * {LINES_OF_FILE})\''
    calls = [
        ("execute_bash", {"command": make, "timeout": 60}),
        ("apply_patch", {"patch": f"*** Begin Patch\n{patch}*** End Patch\n"}),
        ("execute_bash", {"command": "echo after"}),
    ]
    (cid,) = await cluster.submit(script(*calls), latency=0.5, enable_patch=True)
    folder = Path((cluster.root / f"{cid}.where").read_text())
    watched = folder / str(changed_first)

    def is_begun() -> bool:
        return watched.exists() and watched.read_text().startswith("new")

    await cluster.until(is_begun, what="the first files of the patch")
    kill_host(cluster, cid)
    await cluster.settle([cid])
    made, unknown, after = await answers(cluster, cid)
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
    calls = script(*(("execute_ipython_cell", {"code": code}) for code in (waits, after)))
    (cid,) = await cluster.submit(calls, enable_jupyter=True)
    await cluster.until(trace.exists, what="the cell", limit=START_LIMIT_SECONDS)
    kill_host(cluster, cid)
    await cluster.settle([cid], limit=START_LIMIT_SECONDS)
    unknown, shown = await answers(cluster, cid)
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
        codes = (f"goto('{site.url('/never')}')", f"goto('{url}')")
        (cid,) = await cluster.submit(script(*(("browser", {"code": code}) for code in codes)), enable_browsing=True)
        await cluster.until(site.held.is_set, what="the page", limit=START_LIMIT_SECONDS)
        kill_host(cluster, cid)
        site.released.set()
        await cluster.settle([cid], limit=START_LIMIT_SECONDS)
        unknown, shown = await answers(cluster, cid)
        assert isinstance(unknown, OutcomeUnknownObservation)
        assert "heading 'Orders'" in text_of(shown)
        assert [asked for asked in site.asked if asked in ("/never", "/order")] == ["/never", "/order"]
