"""The cost of a conversation with delegates is the same wherever it is shown."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec
from deckhands.client.conversation.async_conversation import AsyncConversation
from tests.browser_pages import CHROMIUM, opened, scripted
from tests.integration.command_line import COMMAND
from tests.server_parts import Served, served_with_workers
from tests.terminal_parts import person
from tests.turns import call, finish

LIMIT_SECONDS = 180.0
OWN, HELPER, INNER = 0.25 + 0.5, 0.125 + 0.0625, 1.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served_with_workers(tmp_path) as found:
        yield found


def team(folder: Path, inner_usd: float | None) -> AgentSpec:
    """An agent with a delegate that has a delegate itself."""

    def handing(name: str, cost_usd: float, end_usd: float) -> AgentSpec:
        turn = call("delegate", agent=name, task="look") | {"cost_usd": cost_usd}
        return scripted(folder, [turn, finish() | {"cost_usd": end_usd}])

    inner = scripted(folder, [finish() | {"cost_usd": inner_usd}])
    helper = handing("inner", 0.125, 0.0625).model_copy(
        update={"enable_delegation": True, "delegates": {"inner": inner}}
    )
    return handing("helper", 0.25, 0.5).model_copy(update={"enable_delegation": True, "delegates": {"helper": helper}})


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
@pytest.mark.parametrize(("inner_usd", "prefix"), [(INNER, ""), (None, "at least ")])
async def test_every_reader_shows_the_same_cost(
    server: Served, tmp_path: Path, inner_usd: float | None, prefix: str
) -> None:
    total_usd, is_unknown = OWN + HELPER + (inner_usd or 0.0), inner_usd is None
    cid = await server.client.submit("look", agent=team(tmp_path, inner_usd), title="Look")
    summary = await server.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
    assert (summary.state, summary.cost_usd, summary.has_unknown_cost) == ("finished", total_usd, is_unknown)
    async with AsyncConversation(cluster=server.log.operator, conversation_id=cid) as conversation:
        assert (await conversation.metrics()).accumulated_cost == total_usd

    env = server.environment(tmp_path / "home") | {"TERM": "xterm-256color"}

    async def read(*arguments: str) -> str:
        done = await asyncio.to_thread(
            subprocess.run, [*COMMAND, *arguments], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    listed = next(row for row in map(json.loads, (await read("ls", "--json")).splitlines()) if row["title"])
    assert (listed["cost_usd"], listed["has_unknown_cost"]) == (total_usd, is_unknown)
    shown = f"{prefix}${total_usd:.4f}"
    assert f" {shown} " in await read("ls")
    assert f"Cost:         {shown}\n" in await read("show", cid)

    def watch() -> None:
        with person([*COMMAND, "top"], env, columns=170) as seen:
            seen.waits_for(cid)
            row = next(line for line in seen.lines if cid in line)
            assert f" {'>=' * is_unknown}${total_usd:.4f} " in row
            seen.type("q")
            assert seen.leaves() == 0

    await asyncio.to_thread(watch)
    token = await server.token("*")
    async with server.as_(token) as http:
        rows = (await http.get("/conversations")).json()["conversations"]
        numbers = next(row["numbers"] for row in rows if row["conversation_id"] == cid)
        found = (await http.get(f"/conversations/{cid}")).json()
    assert (float(numbers["cost_usd"]), numbers["has_unknown_cost"]) == (total_usd, str(int(is_unknown)))
    assert (found["summary"]["cost_usd"], found["summary"]["has_unknown_cost"]) == (total_usd, is_unknown)

    on_page = shown if total_usd < 1 else f"{prefix}${total_usd:.2f}"
    async with opened(f"{server.url}/#/c/{cid}", key=token) as page:
        await page.locator("#state.finished").wait_for()
        await page.locator("#spent").get_by_text(on_page, exact=True).wait_for()
        await page.get_by_role("link", name="Conversations").click()
        row_on_page = page.get_by_role("row").filter(has=page.get_by_role("link", name="Look"))
        await row_on_page.get_by_role("cell", name=on_page, exact=True).wait_for()
