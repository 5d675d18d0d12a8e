"""MCP servers that a task or a skill names: they need the operator's leave, and serve one conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import MCPAction
from broker.contract.agent_state import AgentState
from broker.contract.recall import RecallObservation
from broker.contract.specs import WorkspaceSpec
from broker.contract.tool_specs import McpAddress
from broker.runtime import UsageError
from broker.tools import AllowedServers, ToolFailed
from controller_worker.loop.replay import replay
from tests.faults.harness import FaultCluster
from tests.faults.test_mcp_tasks import text_of
from tests.polling import until
from tests.task_mcp_server import TaskServer
from tests.turns import bash, call, finish
from tool_worker.tools import TaskServers
from tool_worker.tools.offered import OfferedTools

SECRET = "token-of-the-task-7"


def host_of(remote: TaskServer) -> str:
    return remote.url.split("/")[2]


def operators(cluster: FaultCluster, servers: Mapping[str, Any] = {}, **allow: list[str]) -> dict[str, str]:
    """Write the operator's file, and return the settings of the tool workers."""
    path = cluster.root / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers, "allow": allow}))
    return {"DECKHANDS_MCP": str(path)}


def task_of(remote: TaskServer, **server: Any) -> dict[str, Any]:
    return {"mcp_servers": {"mine": {"url": remote.url, **server}}}


def write_skill(folder: Path, servers: Mapping[str, Any], *, file: str = ".mcp.json") -> None:
    skill = folder / ".agents" / "skills" / "sizes"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: sizes\ndescription: Knows sizes.\n---\nAsk the server.\n")
    (skill / file).write_text(json.dumps({"mcpServers": servers}))


async def work_with_skill(
    cluster: FaultCluster, servers: Mapping[str, Any], *, tool: str = "job", file: str = ".mcp.json"
) -> tuple[str, RecallObservation]:
    """Run a task in a workspace with a skill that asks for servers."""
    folder = cluster.root / "work" / "with-skill"
    write_skill(folder, servers, file=file)
    workspace = WorkspaceSpec(path=str(folder), sandbox="none")
    turns = [call(tool, name="one", seconds=0), finish()]
    (cid,) = await cluster.submit(turns, task={"workspace": workspace}, enable_workspace_skills=True)
    await cluster.settle([cid])
    events = await cluster.client.events(cid)
    (recall,) = [event for event in events if isinstance(event, RecallObservation)]
    assert replay(events).divergence is None
    return cid, recall


async def error_of(cluster: FaultCluster, conversation_id: str) -> str:
    await cluster.settle([conversation_id])
    row = await cluster.client.row(conversation_id)
    assert row.state == AgentState.ERROR
    return str(await cluster.client.summary(conversation_id))


async def test_task_gets_the_tools_of_its_server(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, tasks=[host_of(remote)]))
    asked = {**task_of(remote, headers={"Authorization": "Bearer ${TOKEN}"}), "secrets": {"TOKEN": SECRET}}
    (cid,) = await cluster.submit([call("job", name="one", seconds=0.1), finish()], task=asked)
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "one is done"
    assert remote.headers["Authorization"] == f"Bearer {SECRET}"
    events = await cluster.client.events(cid)
    assert SECRET not in "".join(event.model_dump_json() for event in events)
    assert replay(events).divergence is None


async def test_server_that_is_not_allowed_is_refused(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, tasks=["mcp.example.com"], skills=[host_of(remote)]))
    (cid,) = await cluster.submit([finish()], task=task_of(remote))
    error = await error_of(cluster, cid)
    assert "The MCP server mine" in error
    assert "does not allow" in error
    assert "`allow`" in error
    assert not remote.seen


async def test_without_the_operators_leave_no_server_is_reached(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start()
    (cid,) = await cluster.submit([finish()], task=task_of(remote))
    assert "does not allow" in await error_of(cluster, cid)
    assert not remote.seen


async def test_missing_secret_of_a_header_is_named(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, tasks=[host_of(remote)]))
    (cid,) = await cluster.submit([finish()], task=task_of(remote, headers={"X-Key": "${ABSENT}"}))
    assert "needs the secret ABSENT" in await error_of(cluster, cid)
    assert not remote.seen


async def test_name_of_an_operators_server_cannot_be_taken(cluster: FaultCluster, remote: TaskServer) -> None:
    own = {"mine": {"url": "http://127.0.0.1:9/mcp"}}
    cluster.start(**operators(cluster, own, tasks=[host_of(remote)]))
    (cid,) = await cluster.submit([finish()], task=task_of(remote))
    assert "choose another name" in await error_of(cluster, cid)
    assert not remote.seen


async def test_resumed_task_reaches_a_server_that_came_back(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, tasks=[host_of(remote)]))
    remote.is_away = True
    (cid,) = await cluster.submit([call("job", name="one", seconds=0), finish()], task=task_of(remote))
    assert "cannot be reached" in await error_of(cluster, cid)
    remote.is_away = False
    await cluster.client.resume(cid)
    await until(lambda: remote.started["one"] == 1, what="the call")
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "one is done"
    assert replay(await cluster.client.events(cid)).divergence is None


async def test_task_of_its_server_survives_kills_of_both_workers(cluster: FaultCluster, remote: TaskServer) -> None:
    environment = operators(cluster, tasks=[host_of(remote)])
    cluster.start(**environment)
    (cid,) = await cluster.submit([call("job", name="long"), finish()], task=task_of(remote))
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    cluster.kill("t1")
    cluster.kill("c1")
    remote.is_away = True
    cluster.start_controller("c2")
    cluster.start_tool("t2", **environment)
    await until(lambda: "a call waits for its server" in cluster.log_of("t2"), limit=60, what="the second worker")
    remote.is_away = False
    remote.end_all()
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "long is done"
    assert remote.started == {"long": 1}


async def test_leave_that_is_taken_back_holds_at_the_next_call(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, tasks=[host_of(remote)]))
    turns = [bash("touch here; while [ ! -e go ]; do sleep 0.1; done"), call("job", name="one"), finish()]
    (cid,) = await cluster.submit(turns, task=task_of(remote))
    await cluster.until_kind(cid, "action.run")
    cluster.kill("t1")
    cluster.start_tool("t2", **operators(cluster))
    folder = Path((cluster.root / f"{cid}.where").read_text())
    (folder / "go").touch()
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert "does not allow" in answer.content
    assert not remote.started


async def test_operators_server_is_named_without_an_address(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, {"sizes": {"url": remote.url}}))
    task = {"mcp_servers": {"sizes": {"tools": ["job"]}}}
    (cid,) = await cluster.submit([call("job", name="one", seconds=0), finish()], task=task)
    await cluster.settle([cid])
    (action,) = [event for event in await cluster.client.events(cid) if isinstance(event, MCPAction)]
    assert (action.tool, action.server) == ("sizes/job", None)
    with pytest.raises(UsageError, match="No tool worker offers the tool 'nowhere/"):
        await cluster.client.submit("do it", mcp_servers={"nowhere": {}})


@pytest.mark.parametrize("file", [".mcp.json", "mcp.json"])
async def test_skill_gets_an_allowed_server(cluster: FaultCluster, remote: TaskServer, file: str) -> None:
    cluster.start(**operators(cluster, skills=[host_of(remote)]))
    cid, recall = await work_with_skill(cluster, {"mine": {"url": remote.url}}, file=file)
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "one is done"
    assert recall.unreadable_skills is None


async def test_skill_gets_an_operators_server_with_leave(cluster: FaultCluster, remote: TaskServer) -> None:
    own = {"sizes": {"url": remote.url}}
    cluster.start(**operators(cluster, own, skill_servers=["sizes"]))
    await until(lambda: remote.seen["tools/list"] > 0, what="the tools")
    cid, recall = await work_with_skill(cluster, {"sizes": {"command": "evil"}})
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "one is done"
    assert recall.unreadable_skills is None


async def test_servers_of_a_skill_without_leave_are_named(cluster: FaultCluster, remote: TaskServer) -> None:
    own = {"sizes": {"url": remote.url}}
    cluster.start(**operators(cluster, own, tasks=[host_of(remote)]))
    marker = cluster.root / "started"
    program = {"command": "touch", "args": [str(marker)]}
    servers = {"sizes": program, "program": program, "elsewhere": {"url": remote.url}}
    cid, recall = await work_with_skill(cluster, servers)
    notices = " ".join(recall.unreadable_skills or ())
    assert "sizes of the skill 'sizes' is not offered: the operator's server of this name" in notices
    assert "program of the skill 'sizes' is not offered: it is a program" in notices
    assert "elsewhere of the skill 'sizes' is not offered: its host '127.0.0.1'" in notices
    assert not marker.exists()
    assert not remote.started
    assert await cluster.answers(cid, "action.call_tool_mcp") == []


async def test_skill_gives_its_server_no_secret(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**operators(cluster, skills=[host_of(remote)]))
    server = {"url": remote.url, "headers": {"Authorization": "Bearer ${TOKEN}"}}
    _, recall = await work_with_skill(cluster, {"mine": server})
    assert "a skill gives none" in " ".join(recall.unreadable_skills or ())
    assert not remote.seen


ADDRESSES = [
    ({"url": "https://mcp.example.com@evil.test/x"}, "without a user's name"),
    ({"url": "https://mcp.example.com\\@evil.test/x"}, "unusual characters"),
    ({"url": "file:///etc/passwd"}, "write https"),
    ({"command": "sh", "args": ["-c", "true"]}, "a program is named in the operator's file"),
    ({"url": "https://mcp.example.com/x", "headers": {"Authorization": SECRET}}, "has no secret in it"),
    ({"url": "https://mcp.example.com/x", "headers": {"Host": "${A}"}}, "belong to the protocol"),
    ({"headers": {"X": "${A}"}}, "headers need a url"),
]


@pytest.mark.parametrize(("server", "words"), ADDRESSES)
async def test_server_that_cannot_be_used_is_refused(cluster: FaultCluster, server: Any, words: str) -> None:
    with pytest.raises(UsageError, match="mcp_servers") as refused:
        await cluster.client.submit("do it", mcp_servers={"mine": server})
    assert words in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "hosts", "is_allowed"),
    [
        ("https://mcp.example.com/mcp", ["*.example.com"], True),
        ("https://mcp.example.com:8443/mcp", ["*.example.com"], False),
        ("http://mcp.example.com/mcp", ["*.example.com:443"], False),
        ("https://example.com.evil.test/mcp", ["*.example.com"], False),
        ("https://evil.test/.example.com", ["*.example.com"], False),
        ("https://0x7f.1/mcp", ["127.0.0.1"], False),
    ],
)
async def test_forged_call_reaches_allowed_hosts_alone(url: str, hosts: list[str], is_allowed: bool) -> None:
    servers = TaskServers(AllowedServers(tasks=tuple(hosts)), offered=OfferedTools(()))
    forged = MCPAction(name="x", tool="mine/x", server=McpAddress(url=url, headers={"X-Key": "${ABSENT}"}))
    with pytest.raises(ToolFailed, match="needs the secret ABSENT" if is_allowed else "does not allow"):
        async with servers.use_tool("conversation-1", forged):
            pass
