"""Fixtures of tests with a real store, and of those with real shells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conversation_hands import hands  # noqa: F401  (a fixture)
from tests.ingress_parts import producer  # noqa: F401  (a fixture)
from tests.integration.workspace_hosts import Terminal, opened
from tests.served_stores import programs  # noqa: F401  (a fixture)
from tool_worker.workspace.workspaces import Workspaces


@pytest.fixture
async def workspaces(tmp_path: Path) -> AsyncIterator[Workspaces]:
    """Workspaces of a node without a sandbox."""
    async with opened(tmp_path / "node") as workspaces:
        yield workspaces


@pytest.fixture
async def run(workspaces: Workspaces) -> Terminal:
    """A shell in one of them."""
    return Terminal(await workspaces.open("conversation"))
