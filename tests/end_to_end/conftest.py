"""Tests of whole programs, from their start to their end: the command, the pages, the examples, the packages.

Each starts interpreters, workers or a browser, so together they take as long as all others: `make test` leaves
them to `make end-to-end`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.conftest import cluster, durable_cluster  # noqa: F401  (fixtures)
from tests.ingress_parts import producer  # noqa: F401  (a fixture)
from tests.integration.conftest import hands, programs, run, workspaces  # noqa: F401  (fixtures)
from tests.server_parts import Served, served


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:  # noqa: F811
    """A server without workers."""
    async with served(tmp_path / "log", programs) as found:
        yield found
