"""The examples of docs/serving.md, unchanged, and the log of `deckhands serve`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from broker.runtime.child import ChildProcess
from tests.ingress_parts import saying
from tests.npm_packages import install_packages
from tests.page_blocks import blocks_of
from tests.polling import unhurried, until
from tests.served_stores import worker
from tests.server_parts import served
from tests.stores import RealServer, emptied


async def test_the_examples_run_as_they_stand(tmp_path: Path, programs: dict[str, str]) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": saying("three files")}))
    texts: dict[str, list[str]] = {"bash": [], "python": [], "json": [], "typescript": []}
    for block in blocks_of("docs/serving.md"):
        texts[block.language].append(block.text)
    program, *ingresses = texts["python"]
    assert "acp" in json.loads(texts["json"][0])["agent_servers"]["Deckhands"]["args"]
    starting, keeping, request, uploading, _generating = texts["bash"]
    (tmp_path / "a.txt").write_text("a")
    with tarfile.open(tmp_path / "work.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    async with served(tmp_path / "log", programs) as server:
        here = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "DECKHANDS_URL": server.log.operator,
            "DECKHANDS_CELERY_URL": "memory://",
            "DECKHANDS_HOME": str(tmp_path / "home"),
        }
        answers = [
            await _output(["sh", "-c", line.replace("http://127.0.0.1:8900", f"-s {server.url}")], here)
            for line in starting.splitlines()[1:]
        ]
        assert answers[0] == '{"status":"ok"}'
        assert json.loads(answers[1])["store"] is True
        assert json.loads(answers[2])["openapi"] == "3.1.0"
        add, add_other, ls, revoke = keeping.splitlines()
        key = (await _output(["sh", "-c", add], here)).strip()
        other = (await _output(["sh", "-c", add_other], here)).split("_")[1]
        await _output(["sh", "-c", revoke.replace("KEY", other)], here)
        environment = here | {"SERVER": server.url, "KEY": key}
        async with worker("controller_worker", here | {"LLM_MODEL": f"scripted/{script}"}, server.log):
            answer = json.loads(await _output(["sh", "-c", request], environment))
            assert answer["summary"]["message"] == "three files"
            in_folder = f"cd '{tmp_path}'\n{uploading}"
            laid_by, _, begun = (await _output(["sh", "-c", in_folder], environment)).partition("}")
            assert json.loads(f"{laid_by}}}")["kept_seconds"] == 3_600
            assert "conversation_id" in json.loads(begun)
            printed = (await _output([sys.executable, "-c", program], environment)).splitlines()
            said = [await _output([sys.executable, "-c", text], environment) for text in ingresses]
        assert (printed[0], printed[-1].strip()) == ("event conversation.created", "end")
        assert [text.splitlines()[0] for text in said] == ["three files"] * 4
        listed = await _output(["sh", "-c", ls.replace("key ls", "key ls --json")], here)
        mine, theirs = map(json.loads, listed.splitlines())
        assert (mine["name"], mine["state"], theirs["state"]) == ("shop", "good", "revoked")
        assert mine["last_used"] is not None
        assert "digest" not in mine


async def _output(command: list[str], environment: dict[str, str]) -> str:
    running = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    printed, _ = await asyncio.wait_for(running.communicate(), unhurried(60))
    assert running.returncode == 0
    return printed.decode()


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
    return await asyncio.to_thread(install_packages, PROJECT, tmp_path / "project")


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
        async with worker("controller_worker", here, server.log):
            for command in (("sh", "-c", generating), ("npx", "tsc")):
                status, printed = await _run(*command, folder=project, **key)
                assert status == 0, printed
            status, printed = await _run("node", "main.js", folder=project, **key)
    assert status == 0, printed
    lines = printed.splitlines()
    assert (lines[0], lines[1]) == ("three files", "1 conversation.created")


async def test_every_line_is_an_object_if_logs_are_json(valkey_server: RealServer, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "DECKHANDS_URL": await emptied(valkey_server.url),
        "DECKHANDS_HOME": str(tmp_path / "home"),
        "DECKHANDS_LOG_FORMAT": "json",
    }
    log = tmp_path / "server.log"
    command = [sys.executable, "-P", "-m", "deckhands", "serve", "--port", "0"]
    server = ChildProcess.start(command, log=log, env=environment)
    await until(lambda: "session manager started" in log.read_text(), limit=LIMIT_SECONDS, what="a server")
    os.kill(server.pid, signal.SIGTERM)
    await server.stop(grace_seconds=20)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["role"] for line in lines} == {"server"}
    assert {"deckhands.cli.commands.gateway", "mcp.server.streamable_http_manager"} <= {
        line["logger"] for line in lines
    }
    assert any("Serving at http://127.0.0.1:" in line["message"] for line in lines)
