"""Models whose servers accept and never answer, and whose clients never get made, beside models that answer."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from controller_worker.providers.llm import ModelRequest
from tests.faults.harness import FaultCluster
from tests.polling import until
from tests.turns import finish

TABLE = """
[llm]
model = "{good}"
[llm.openai]
model = "openai/x"
base_url = "{url}/v1"
api_key = "k"
[llm.anthropic]
model = "anthropic/claude-sonnet-4-5"
base_url = "{url}"
api_key = "k"
[llm.litellm]
model = "openai/x"
base_url = "{url}/v1"
backend = "litellm"
api_key = "k"
[llm.routed]
router = {{kind = "class", path = "{module}:BlockingRouter", choices = ["openai"]}}
"""
BLOCKED = ("openai", "anthropic", "litellm") * 2 + ("routed",) * 3


class BlockingRouter:
    """A router of the operator's that waits for a server while it is made."""

    def __init__(self) -> None:
        with socket.create_connection((os.environ["SILENT_HOST"], int(os.environ["SILENT_PORT"]))) as client:
            client.sendall(b"made")
            client.recv(1)

    def select_llm(self, _: ModelRequest) -> str:
        return "openai"


async def test_blocked_calls_hold_up_nothing_and_are_cancelled(tmp_path: Path) -> None:
    asked = 0

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.read(1)
        asked += 1
        while await reader.read(100_000):  # until the client has had enough
            pass
        writer.close()

    async with (
        await asyncio.start_server(keep_silent, "127.0.0.1", 0) as server,
        FaultCluster(tmp_path / "cluster").running() as cluster,
    ):
        host, port = server.sockets[0].getsockname()
        table = tmp_path / "models.toml"
        table.write_text(TABLE.format(good=cluster.script(finish()), url=f"http://{host}:{port}", module=__name__))
        (cluster.root / "work").mkdir()
        worker = cluster.start_controller(
            LLM_CONFIG=str(table), DECKHANDS_ANY_MODEL="", SILENT_HOST=host, SILENT_PORT=str(port)
        )
        client = cluster.client
        blocked = [await client.submit("do it", model=model) for model in BLOCKED]
        await until(lambda: asked == 7, limit=120.0, what="six calls and the making of one router")
        others = [await client.submit("do it") for _ in range(5)]
        await cluster.settle(others)
        assert {(await client.row(other)).state for other in others} == {"finished"}
        assert {(await client.row(each)).state for each in blocked} == {"running"}
        for each in blocked:
            await client.cancel(each)
        await cluster.settle(blocked)
        assert {(await client.row(each)).state for each in blocked} == {"stopped"}
        again = await client.submit("do it")
        await cluster.settle([again])
        worker.terminate()
        assert await cluster.until_ended("c1", limit=60.0) == 0
