"""The examples of docs/serving.md, as they stand there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.ingress_parts import saying
from tests.page_blocks import blocks_of
from tests.polling import unhurried
from tests.served_stores import worker
from tests.server_parts import served


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
            "DECKHANDS_URL": server.log.worker,
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
        async with worker("controller_worker", here | {"LLM_MODEL": f"scripted/{script}"}):
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
