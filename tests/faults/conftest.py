"""A cluster for each fault test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.harness import FaultCluster
from tests.task_mcp_server import TaskServer, task_server


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path).running() as running:
        yield running


@pytest.fixture
async def durable_cluster(tmp_path: Path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path, append_fsync="always").running() as running:
        yield running


@pytest.fixture
async def remote() -> AsyncIterator[TaskServer]:
    async with task_server() as server:
        yield server
