"""The job `checkpoints` removes those of conversations that are nowhere any more, and that no fork may begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.clock import SystemClock
from broker.runtime.settings import BrokerSettings
from deckhands.client.client import Client
from deckhands.operations.jobs.checkpoints import CheckpointsNotRemoved, remove_checkpoints
from deckhands.operations.jobs.job import JobServices
from tests.archive_parts import begin_ended, retired
from tests.stores import RealServer, emptied
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles


async def test_only_what_nobody_needs_goes(valkey_server: RealServer, tmp_path: Path) -> None:
    place, archive = f"file://{tmp_path}/checkpoints", tmp_path / "archive"
    checkpoints = Checkpoints(place, SystemClock())
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("content")
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        services = JobServices(client.store, BrokerSettings(archive=str(archive), checkpoints=place))
        assert await remove_checkpoints(services) == {"forgotten": 0, "dropped": 0}
        for name in ("archived", "origin", "gone", "here"):
            await begin_ended(client, name)
            checkpoints.save(name, tmp_path / "work", SavedFiles(), event=3)
            if name == "archived":
                await retired(client.store, archive, tmp_path)
        await client.fork("origin")
        await client.delete("origin")
        await client.delete("gone")
        assert await remove_checkpoints(services) == {"forgotten": 1, "dropped": 0}
        left = [name for name in ("archived", "origin", "gone", "here") if checkpoints.has(name)]
        assert left == ["archived", "origin", "here"]
        (tmp_path / "checkpoints" / "checkpoints" / "here").write_text("damaged")
        with pytest.raises(CheckpointsNotRemoved, match="cannot be removed"):
            await remove_checkpoints(services)
        assert checkpoints.has("origin")
