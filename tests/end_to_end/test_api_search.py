"""The HTTP API as schemathesis sees it: all its checks, every operation, chains of requests, at a real server.

Holds: at a push the same requests each time; `make soak` looks at the large bodies part by part too, and further.
Does not: follow streams, which do not end.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ingress_parts import saying
from tests.polling import unhurried
from tests.server_parts import Served, served_with_workers
from tests.turns import script

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "tests" / "api_search.toml"
STREAMS = "/stream$"
LARGE = ("conversations_create", "conversations_change", "runs_wait", "schedules_add")
"""Operations that take a whole task or agent: thousands of requests, if each of their parts is tried."""


async def _search(server: Served, folder: Path, settings: Path, *options: str, limit: float) -> str:
    token = await server.token("*", requests_per_minute=1_000_000)
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)),
        *("run", f"{server.url}/openapi.json"),
        *("--checks", "all", "--exclude-path-regex", STREAMS, "--request-timeout", "60", "--no-color"),
        *("--generation-database", "none", "--warnings", "off", "-H", f"Authorization: Bearer {token}", *options),
    )
    environment = {"PATH": str(Path(sys.executable).parent), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    running = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**environment, "SCHEMATHESIS_HOOKS": "tests.api_search"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(running.communicate(), unhurried(limit))
    finally:
        if running.returncode is None:
            running.kill()
            await running.communicate()
    assert running.returncode == 0, printed.decode()[-20_000:]
    return printed.decode()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    default = script(tmp_path / "default.json", *saying("by default"))
    async with served_with_workers(tmp_path, LLM_MODEL=default) as found:
        yield found


@pytest.mark.timeout(1_200)
async def test_a_short_search_finds_nothing(tmp_path: Path, server: Served) -> None:
    left_out = "".join(
        f'\n[[operations]]\ninclude-operation-id = "{name}"\n[operations.phases.coverage]\nenabled = false\n'
        for name in LARGE
    )
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS.read_text() + left_out)
    printed = await _search(server, tmp_path, settings, "--seed", "1", "-n", "3", limit=240)
    assert "Stateful" in printed


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_a_long_search_finds_nothing(tmp_path: Path, server: Served) -> None:
    await _search(server, tmp_path, SETTINGS, "-n", "50", limit=3_000)
