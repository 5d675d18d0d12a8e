"""A tool worker killed at every boundary, whatever its tool is: nothing is lost, run twice or claimed to be known.

Commands, cells and pages continue in their hosts, and the next worker collects them once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.celery.dispatch import TaskSender
from broker.contract.actions import ToolCallAction
from broker.contract.browser_events import BrowserOutputObservation
from broker.contract.events import AgentSpec, LLMSpec, Observation
from broker.contract.observations import MCPObservation
from broker.contract.workspace_events import WorkspaceOpenedObservation
from broker.store.embedded import EmbeddedValkey
from tests.browser_parts import opened_site
from tests.docker_image import image
from tests.faults.harness import FaultCluster, steps
from tests.kubernetes_api import running_cluster
from tests.polling import until
from tests.turns import bash, call, finish
from tool_worker.worker.steps.action_run import compute_fingerprint
from tool_worker.workspace.workspaces import Workspaces

LIMIT_SECONDS = 180.0
"""A browser or a kernel takes its time to start."""


async def die_and_follow(cluster: FaultCluster, **environment: str) -> None:
    """Wait until the victim has died, and start another worker."""
    assert await cluster.until_ended("victim", limit=LIMIT_SECONDS) == -9
    cluster.start_tool("survivor", **environment)


# Commands


@pytest.mark.parametrize(
    "failpoint",
    [
        "tool.after_claim:kill@1",
        "tool.after_result:kill@1",
        "tool.after_append:kill@1",
        *(pytest.param(f"tool.before_{what}:kill@1", marks=pytest.mark.soak) for what in ("claim", "run", "append")),
        pytest.param("tool.before_claim:kill@3", marks=pytest.mark.slow),
        pytest.param("tool.after_result:kill@3", marks=pytest.mark.slow),
    ],
)
async def test_action_survives_a_kill_at(cluster: FaultCluster, failpoint: str) -> None:
    cluster.start_controller()
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=failpoint)
    ids = await cluster.submit(steps(3))
    await die_and_follow(cluster)
    await cluster.check(ids, commands=3)


async def test_running_command_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("victim")
    ids = await cluster.submit(steps(2, seconds=4.0))
    await cluster.until(lambda: cluster.effects(ids[0]) == ["begin-0"])
    cluster.kill("victim")
    cluster.start_tool("survivor")
    await cluster.check(ids, commands=2)
    outputs = [event for event in await cluster.client.events(ids[0]) if event.kind == "observation.run"]
    assert [output.content.strip() for output in outputs] == ["done 0", "done 1"]
    assert cluster.effects(ids[0]) == ["begin-0", "end-0", "begin-1", "end-1"]


async def test_both_kinds_of_worker_die_at_once(cluster: FaultCluster) -> None:
    cluster.start()
    ids = await cluster.submit(steps(3, seconds=1.0), count=3)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    cluster.kill("c1")
    cluster.kill("t1")
    cluster.start()
    await cluster.check(ids, commands=3)


@pytest.mark.docker
@pytest.mark.parametrize("boundary", ["", "tool.before_run", "tool.after_result"])
async def test_a_command_in_a_container_is_run_once(cluster: FaultCluster, boundary: str) -> None:
    settings = {"DECKHANDS_SANDBOX": "docker", "DECKHANDS_DOCKER_IMAGES": image()}
    cluster.start_controller()
    failpoint = {"DECKHANDS_FAILPOINTS": f"{boundary}:kill@1"} if boundary else {}
    cluster.start_tool("victim", **settings, **failpoint)
    (cid,) = ids = await cluster.submit(steps(2, seconds=0.5 if boundary else 4.0), sandbox="docker")
    if not boundary:
        await cluster.until(lambda: cluster.effects(cid) == ["begin-0"], limit=60)
        cluster.signal("victim", signal.SIGKILL)
    await die_and_follow(cluster, **settings)
    await cluster.check(ids, commands=2)
    assert cluster.effects(cid) == ["begin-0", "end-0", "begin-1", "end-1"]
    await cluster.close_workspaces(ids)
    listed = ["docker", "ps", "--all", "--quiet", "--filter", f"label=deckhands.conversation={cid}"]
    await until(lambda: not subprocess.run(listed, capture_output=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "boundary", ["", *(pytest.param(f"tool.{when}", marks=pytest.mark.slow) for when in ("before_run", "after_result"))]
)
async def test_a_command_in_a_pod_is_run_once(cluster: FaultCluster, boundary: str) -> None:
    with running_cluster(cluster.root / "kubernetes", cluster.root) as kubernetes:
        settings = kubernetes.environment()
        cluster.start_controller()
        failpoint = {"DECKHANDS_FAILPOINTS": f"{boundary}:kill@1"} if boundary else {}
        cluster.start_tool("victim", **settings, **failpoint)
        (cid,) = ids = await cluster.submit(steps(2, seconds=0.5 if boundary else 4.0), sandbox="kubernetes")
        workspaces = Workspaces(cluster.root / "n", sandbox="kubernetes", containers=kubernetes.settings())
        try:
            if not boundary:
                await cluster.until(lambda: cluster.effects(cid) == ["begin-0"], limit=LIMIT_SECONDS)
                (before,) = kubernetes.find_pods_of(cid)
                cluster.signal("victim", signal.SIGKILL)
            await die_and_follow(cluster, **settings)
            await cluster.check(ids, commands=2)
            assert cluster.effects(cid) == ["begin-0", "end-0", "begin-1", "end-1"]
            if not boundary:
                (after,) = kubernetes.find_pods_of(cid)
                assert after["metadata"]["uid"] == before["metadata"]["uid"]
            await cluster.client.files.write(cid, "given.txt", "for the pod")
            assert await cluster.client.files.read(cid, "given.txt") == b"for the pod"
        finally:
            cluster.kill("survivor")
            await workspaces.close(cid)
            await workspaces.aclose()
            shutil.rmtree(cluster.root / "n" / cid)  # closed already, and the fixture knows no API server
        assert kubernetes.find_pods_of(cid) == []


# Opening a workspace


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("tool.before_run", marks=pytest.mark.soak),
        "tool.before_append",
        *(pytest.param(f"tool.after_{what}", marks=pytest.mark.slow) for what in ("claim", "append")),
    ],
)
async def test_a_workspace_is_opened_once_whoever_dies(cluster: FaultCluster, point: str) -> None:
    project = cluster.root / "project"
    project.mkdir()
    (project / "README").write_text("one\n")
    author = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for arguments in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=project, check=True, timeout=20)
    cluster.start_controller()
    roots = {"DECKHANDS_REPOSITORY_ROOTS": str(cluster.root)}
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{point}:kill@1", **roots)
    agent = AgentSpec(llm=LLMSpec(model=cluster.script(bash("cat README"), finish())))
    cid = await cluster.client.submit("do it", agent=agent, workspace=f"git+file://{project}")
    await die_and_follow(cluster, **roots)
    await cluster.settle([cid], limit=90)
    events = await cluster.client.events(cid)
    assert (await cluster.client.row(cid)).state == "finished"
    assert sum(isinstance(event, WorkspaceOpenedObservation) for event in events) == 1
    assert [event.content for event in events if event.kind == "observation.run"] == ["one"]
    left = {path.name for path in (cluster.root / "n" / cid).iterdir()}
    assert left >= {"workspace", "base.git", "opened.json"}
    assert not any(name.startswith(".draft-") for name in left)


# Custom tools

TOOLS = ",".join(f"tests.example_tools:{name}" for name in ("add", "render", "PlaceOrder"))
RENDER = call("render", scene="sea")


async def run_with_a_kill(
    cluster: FaultCluster, boundary: str, turn: dict[str, Any], tool: str
) -> tuple[Observation, list[str]]:
    trace = cluster.root / "trace"
    environment = {"DECKHANDS_TOOLS": TOOLS, "DECKHANDS_POOLS": "bash,gpu", "EXAMPLE_TOOLS_TRACE": str(trace)}
    cluster.start_controller()
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{boundary}:kill@1", **environment)
    ids = await cluster.submit([turn, finish()], tools=[tool])
    await die_and_follow(cluster, **environment)
    await cluster.settle(ids)
    (answer,) = await cluster.answers(ids[0], "action.call_tool")
    return answer, lines(trace)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("boundary", "effects"), [pytest.param("tool.before_run", 0, marks=pytest.mark.soak), ("tool.after_result", 1)]
)
async def test_unknown_outcome_is_said_to_be_unknown(cluster: FaultCluster, boundary: str, effects: int) -> None:
    answer, trace = await run_with_a_kill(cluster, boundary, RENDER, "render")
    assert answer.kind == "observation.outcome_unknown"
    assert len(trace) == effects


@pytest.mark.parametrize(
    ("boundary", "content"),
    [
        pytest.param("tool.before_run", "Ordered 1 lamp.", marks=pytest.mark.soak),
        ("tool.after_result", "Had been ordered."),
    ],
)
async def test_a_checkable_call_takes_effect_once(cluster: FaultCluster, boundary: str, content: str) -> None:
    answer, trace = await run_with_a_kill(cluster, boundary, call("place_order", item="lamp"), "place_*")
    assert (answer.kind, answer.content) == ("observation.call_tool", content)
    assert len(trace) == 1


# MCP servers

MCP_PROGRAM = Path(__file__).resolve().parents[1] / "example_mcp_server.py"


async def test_mcp_call_in_flight_is_unknown_and_not_repeated(cluster: FaultCluster) -> None:
    trace, gate, path = cluster.root / "trace", cluster.root / "gate", cluster.root / "mcp.json"
    os.mkfifo(gate)
    path.write_text(json.dumps({"mcpServers": {"example": {"command": sys.executable, "args": [str(MCP_PROGRAM)]}}}))
    environment = {"DECKHANDS_MCP": str(path)}
    cluster.start_controller()
    cluster.start_tool("victim", **environment)
    turns = [call("echo", text="hello"), call("count", trace=str(trace), gate=str(gate)), finish()]
    (cid,) = await cluster.submit(turns, tools=["example/*"])
    await cluster.until(trace.exists, what="the call")
    cluster.kill("victim")
    gate.write_text("continue\n")  # lets the program end, which nothing else would
    cluster.start_tool("survivor", **environment)
    await cluster.settle([cid])
    before, unknown = await cluster.answers(cid, "action.call_tool_mcp")
    assert isinstance(before, MCPObservation)
    assert json.loads(before.content)["content"][0]["text"] == "hello"
    assert unknown.kind == "observation.outcome_unknown"
    assert trace.read_text() == "counted\n"


# Celery tasks as tools, with an application and a worker of the user's own


@pytest.fixture
def environment(cluster: FaultCluster) -> dict[str, str]:
    return {
        "EXAMPLE_CELERY_URL": cluster.store.celery_url,
        "EXAMPLE_TOOLS_TRACE": str(cluster.root / "trace"),
        "DECKHANDS_TOOLS": "tests.example_celery:refund_tool,tests.example_celery:stoppable_refund",
    }


@contextmanager
def user_worker(cluster: FaultCluster, environment: dict[str, str], *options: str) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tests.example_celery", "worker", "-Q", "shop", *options]
    with (cluster.root / "shop.log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--without-gossip", "--without-mingle"],
            env=os.environ | environment | {"TMPDIR": str(cluster.root)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


async def refunding(cluster: FaultCluster, order: int, amount: float, *, tool: str = "refund") -> str:
    (cid,) = await cluster.submit([call(tool, order=order, amount=amount), finish()], tools=[tool])
    return cid


async def test_result_or_exception_of_a_task_is_the_answer(cluster: FaultCluster, environment: dict[str, str]) -> None:
    cluster.start_controller()
    cluster.start_tool(**environment)
    with user_worker(cluster, environment, "--pool=solo"):
        ids = [await refunding(cluster, 7, 2.5), await refunding(cluster, 13, 1.0)]
        await cluster.settle(ids)
    paid, failure = [(await cluster.answers(cid, "action.call_tool"))[0] for cid in ids]
    assert paid.outputs == {"order": 7, "paid": 2.5}
    assert failure.kind == "observation.error"
    assert failure.content == "The task shop.tasks.refund failed: ValueError: no such order"
    assert sorted(lines(cluster.root / "trace")) == ["refund 13", "refund 7"]


async def test_killed_workers_task_is_awaited_not_resent(cluster: FaultCluster, environment: dict[str, str]) -> None:
    gate, trace = cluster.root / "trace.gate", cluster.root / "trace"
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool("victim", **environment)
    with user_worker(cluster, environment, "--pool=solo"):
        cid = await refunding(cluster, 99, 4.0)
        await cluster.until(lambda: lines(trace) == ["refund 99"], what="the task")
        cluster.kill("victim")
        cluster.start_tool("survivor", **environment)
        gate.write_text("continue\n")
        await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool")
    assert answer.outputs == {"order": 99, "paid": 4.0}
    assert lines(trace) == ["refund 99", "through the gate"]


async def test_a_task_is_awaited_while_its_backend_is_away(
    cluster: FaultCluster, environment: dict[str, str], tmp_path: Path
) -> None:
    beside = EmbeddedValkey(tmp_path / "beside")
    await beside.start()
    environment |= {"EXAMPLE_CELERY_URL": beside.celery_url}
    gate, trace = cluster.root / "trace.gate", cluster.root / "trace"
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool(**environment)
    try:
        with user_worker(cluster, environment, "--pool=solo"):
            cid = await refunding(cluster, 99, 4.0)
            await cluster.until(lambda: lines(trace) == ["refund 99"], what="the task")
            beside.child.send(signal.SIGKILL)
            await beside.child.wait()
            await beside.start()
            gate.write_text("continue\n")
            await cluster.settle([cid])
        (answer,) = await cluster.answers(cid, "action.call_tool")
        assert answer.outputs == {"order": 99, "paid": 4.0}
    finally:
        await beside.stop()


@pytest.mark.soak
async def test_stopped_conversations_task_is_ended_if_allowed(
    cluster: FaultCluster, environment: dict[str, str]
) -> None:
    os.mkfifo(cluster.root / "trace.gate")
    trace = cluster.root / "trace"
    cluster.start_controller()
    cluster.start_tool(**environment)
    with user_worker(cluster, environment, "--pool=prefork", "-c", "1"):
        cid = await refunding(cluster, 99, 4.0, tool="stoppable_refund")
        await cluster.until(lambda: lines(trace) == ["refund 99"], what="the task")
        await cluster.client.cancel(cid)
        await cluster.settle([cid])
        state = TaskSender(broker_url=cluster.store.celery_url, backend_url=cluster.store.celery_url).load_state
        (action,) = [event for event in await cluster.client.events(cid) if isinstance(event, ToolCallAction)]
        task_id = f"deckhands-{cid}-{action.id}-{compute_fingerprint(action)}"
        await cluster.until(lambda: "TaskRevokedError" in state(task_id).error, what="end of the task")
        assert lines(trace) == ["refund 99"]
        assert [one.kind for one in await cluster.answers(cid, "action.call_tool")] == ["observation.error"]


# Cells

IPYTHON = {"DECKHANDS_POOLS": "bash,ipython"}


async def first_lines(cluster: FaultCluster, conversation_id: str) -> list[str]:
    found = await cluster.answers(conversation_id, "action.run_ipython")
    assert {answer.kind for answer in found} == {"observation.run_ipython"}
    return [answer.content.splitlines()[0] for answer in found]


async def test_a_running_cell_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    trace, gate = cluster.root / "trace", cluster.root / "gate"
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool("victim", **IPYTHON)
    slow = f"print('in', file=open({str(trace)!r}, 'a'), flush=True); open({str(gate)!r}).read(); x = 41; print('out')"
    turns = [call("execute_ipython_cell", code=slow), call("execute_ipython_cell", code="x + 1"), finish()]
    (cid,) = await cluster.submit(turns, enable_jupyter=True)
    await cluster.until(trace.exists, what="the cell", limit=60.0)
    cluster.kill("victim")
    cluster.start_tool("survivor", **IPYTHON)
    gate.write_text("continue\n")
    await cluster.settle([cid])
    assert await first_lines(cluster, cid) == ["out", "42"]
    assert trace.read_text() == "in\n"


# Pages

BROWSER = {"DECKHANDS_POOLS": "bash,browser"}
BROWSE = "action.browse_interactive"


@pytest.mark.slow
async def test_a_page_that_loads_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        site.page("/never", "<h1>At last</h1>")
        cluster.start_controller()
        cluster.start_tool("victim", **BROWSER)
        texts = (f"```goto('{site.url('/never')}')```", "```send_msg_to_user('It was slow.')```")
        (cid,) = await cluster.submit([{"text": text} for text in texts], name="BrowsingAgent")
        await cluster.until(site.held.is_set, what="the page", limit=LIMIT_SECONDS)
        cluster.kill("victim")
        cluster.start_tool("survivor", **BROWSER)
        site.released.set()
        await cluster.settle([cid], limit=LIMIT_SECONDS)
        (page,) = await cluster.answers(cid, BROWSE)
        assert isinstance(page, BrowserOutputObservation)
        assert "heading 'At last'" in page.content
        assert site.asked.count("/never") == 1
        assert (await cluster.client.summary(cid)).outputs == {"content": "It was slow."}


async def test_click_before_a_worker_death_is_not_repeated(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        url = site.page("/order", "<form action=/form method=post><button>Order</button></form>")
        cluster.start_controller()
        cluster.start_tool("victim", DECKHANDS_FAILPOINTS="tool.after_result:kill@2", **BROWSER)
        turns = [call("browser", code=f"goto('{url}')"), call("browser", code="click('6')"), finish("ordered")]
        (cid,) = await cluster.submit(turns, enable_browsing=True)
        await die_and_follow(cluster, **BROWSER)
        await cluster.settle([cid], limit=LIMIT_SECONDS)
        first, second = await cluster.answers(cid, BROWSE)
        assert "[6] button 'Order'" in first.content
        assert first.set_of_marks.startswith("data:image/jpeg;base64,")
        assert isinstance(second, BrowserOutputObservation)
        assert "Thank you." in second.content
        assert len(site.forms) == 1


async def test_a_worker_without_a_browser_says_so(cluster: FaultCluster) -> None:
    cluster.start()
    texts = ("```goto('http://localhost/')```", "```send_msg_to_user('There is no browser.')```")
    (cid,) = await cluster.submit([{"text": text} for text in texts], name="BrowsingAgent")
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, BROWSE)
    assert answer.kind == "observation.error"
    assert "the workspace has no tool 'browser': its tool worker does not serve a pool of that name" in answer.content
