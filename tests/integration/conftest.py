"""Fixtures of tests with a real store, and of those with real shells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from deckhands.evaluation.attempts.results import Results
from tests.conversation_hands import hands  # noqa: F401  (a fixture)
from tests.faults.conftest import cluster  # noqa: F401  (a fixture)
from tests.ingress_parts import Producer, producing
from tests.integration.command_line import CommandLine, environment
from tests.integration.workspace_hosts import Terminal, opened
from tests.served_stores import programs  # noqa: F401  (a fixture)
from tests.stores import RealServer, emptied
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Producer]:
    """An application beside one worker of each kind, for all tests of a module."""
    async with producing(tmp_path_factory.mktemp("producer")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def own_producer(tmp_path: Path) -> AsyncIterator[Producer]:
    """The same for one test that damages it."""
    async with producing(tmp_path) as found:
        yield found


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    """The file with the results of an evaluation."""
    with Results(tmp_path / "results.jsonl") as results:
        yield results


@pytest.fixture
def command(tmp_path: Path, valkey_server: RealServer) -> CommandLine:
    """The command line on an empty store of a cluster without workers."""
    url = asyncio.run(emptied(valkey_server.url))
    return CommandLine(environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none"))
