"""A client that is generated from the OpenAPI document, compiled and run: the TypeScript of docs/serving.md."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ingress_parts import saying
from tests.page_blocks import blocks_of
from tests.polling import unhurried
from tests.served_stores import worker
from tests.server_parts import served

PROJECT = Path(__file__).parent / "typescript"
LIMIT_SECONDS = 120.0


async def _run(*command: str, folder: Path, **more: str) -> tuple[int, str]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(folder)), **more}
    running = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    printed, _ = await asyncio.wait_for(running.communicate(), unhurried(LIMIT_SECONDS))
    assert running.returncode is not None
    return running.returncode, printed.decode()


@pytest.fixture
async def project(tmp_path: Path) -> Path:
    """A project with the packages that the page names."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = Path(shutil.copytree(PROJECT, tmp_path / "project"))
    status, printed = await _run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", folder=folder)
    if status != 0:
        pytest.skip(f"npm cannot install the packages of the client: {printed[-300:]}")
    return folder


async def test_the_typescript_of_the_page_runs_as_it_stands(
    tmp_path: Path, programs: dict[str, str], project: Path
) -> None:
    (program,) = [block.text for block in blocks_of("docs/serving.md") if block.language == "typescript"]
    (generating,) = [
        line
        for block in blocks_of("docs/serving.md")
        if block.language == "bash"
        for line in block.text.splitlines()
        if line.startswith("npx openapi-typescript")
    ]
    (project / "main.ts").write_text(program)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": saying("three files")}))
    async with served(tmp_path / "log", programs) as server:
        here = server.environment(tmp_path / "home", LLM_MODEL=f"scripted/{script}")
        key = {"SERVER": server.url, "KEY": await server.token(scopes=["read", "write"])}
        async with worker("controller_worker", here):
            for command in (("sh", "-c", generating), ("npx", "tsc")):
                status, printed = await _run(*command, folder=project, **key)
                assert status == 0, printed
            status, printed = await _run("node", "main.js", folder=project, **key)
    assert status == 0, printed
    lines = printed.splitlines()
    assert (lines[0], lines[1]) == ("three files", "1 conversation.created")
