"""Progress of MCP calls: those who watch a conversation see it, and the log has none of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from aiohttp import web

from broker.log import LivePiece
from tests.faults.harness import FaultCluster
from tests.polling import until
from tests.scripted_mcp_server import event, scripted_server
from tests.task_mcp_server import task_server
from tests.turns import call, finish

SECRET = "token-of-the-task-9"
REPORTS = 200


def settings(cluster: FaultCluster, url: str) -> dict[str, str]:
    path = cluster.root / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"remote": {"url": url}}}))
    return {"DECKHANDS_MCP": str(path)}


@contextlib.asynccontextmanager
async def watching(cluster: FaultCluster, conversation_id: str) -> AsyncIterator[list[LivePiece]]:
    """Collect the pieces of a conversation about running calls."""
    seen: list[LivePiece] = []

    async def collect() -> None:
        async with contextlib.aclosing(cluster.client.pieces(conversation_id)) as pieces:
            async for piece in pieces:
                seen.extend([piece] if piece.kind == "progress" else ())

    await cluster.client.announce(conversation_id)
    task = asyncio.create_task(collect())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_reports_of_a_call_reach_watchers_only(cluster: FaultCluster) -> None:
    is_called, may_report, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def report(request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json()
        is_called.set()
        await may_report.wait()
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        token = asked["params"]["_meta"]["progressToken"]
        for n in range(1, REPORTS + 1):
            params = {"progressToken": token, "progress": n, "total": REPORTS, "message": f"with {SECRET}\x1b[2J"}
            await stream.write(event({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))
        await may_end.wait()
        result = {"content": [{"type": "text", "text": "fine"}]}
        await stream.write(event({"jsonrpc": "2.0", "id": asked["id"], "result": result}))
        return stream

    async with scripted_server() as server:
        server.before_call = report
        cluster.start(**settings(cluster, server.url))
        (cid,) = await cluster.submit(
            [call("echo", text="x"), finish()], tools=["remote/*"], task={"secrets": {"TOKEN": SECRET}}
        )
        await is_called.wait()
        async with watching(cluster, cid) as seen:
            may_report.set()
            await until(lambda: seen, what="a report")
            may_end.set()
            await cluster.settle([cid])
        events = await cluster.client.events(cid)
        (action,) = [one.id for one in events if one.kind == "action.call_tool_mcp"]
        assert {piece.call for piece in seen} == {f"action {action}"}
        assert seen[0].text.startswith(f"1 of {REPORTS}: with ")
        assert SECRET not in "".join(piece.text for piece in seen)
        assert "\x1b" not in "".join(piece.text for piece in seen)
        assert len(seen) < REPORTS / 10
        assert f"of {REPORTS}" not in "".join(one.model_dump_json() for one in events)


async def test_message_of_a_task_reaches_the_watcher(cluster: FaultCluster) -> None:
    async with task_server() as server:
        cluster.start(**settings(cluster, server.url))
        (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
        await until(lambda: any(job.polls for job in server.jobs.values()), what="a poll")
        async with watching(cluster, cid) as seen:
            server.jobs["task-0"].message = "half of the sheets are printed"
            await until(lambda: seen, what="a report")
            server.end_all()
            await cluster.settle([cid])
        assert "half of the sheets are printed" in seen[0].text
        events = await cluster.client.events(cid)
        assert "half of the sheets" not in "".join(one.model_dump_json() for one in events)
