"""The events of a conversation through a server, until it settles."""

from __future__ import annotations

import contextlib
from pathlib import Path

from broker.contract.events import Tenancy
from deckhands.client.remote.remote_client import RemoteClient
from tests.server_parts import served
from tests.unit.deckhands.sample_log import state


async def test_tail_through_a_server_ends_when_settled(programs: dict[str, str], tmp_path: Path) -> None:
    async with served(tmp_path / "log", programs) as server:
        cid = await server.client.submit("do it", tenancy=Tenancy(tenant="acme"))
        remote = RemoteClient(server.url, await server.token("acme"))
        async with contextlib.aclosing(remote.tail(cid)) as events:
            seen = []
            async for event in events:
                seen.append(event.id)
                if event.id == 2:
                    await server.client.log.append(
                        cid, [state("running"), state("finished")], fields={"state": "finished"}
                    )
        assert seen == [1, 2, 3, 4]
        assert [event.id async for event in remote.tail(cid, after=3)] == [4]
        assert [event.id async for event in remote.tail(cid, after=4)] == []
        await remote.aclose()
