"""The examples of docs/serving.md, as they stand there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.door_parts import saying
from tests.integration.command_line import deckhands
from tests.page_blocks import blocks_of
from tests.polling import unhurried
from tests.served_stores import worker
from tests.server_parts import served


async def test_the_examples_run_as_they_stand(tmp_path: Path, programs: dict[str, str]) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": saying("three files")}))
    found = [block for block in blocks_of("docs/serving.md") if "$KEY" in block.text or "KEY" in block.text]
    (request,) = [block.text for block in found if block.text.startswith("curl")]
    (program,) = [block.text for block in found if block.language == "python"]
    async with served(tmp_path / "log", programs) as server:
        made = deckhands(
            *("key", "add", "shop", "--tenant", "acme"),
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DECKHANDS_URL": server.log.worker},
        )
        assert made.code == 0, made.err
        environment = {"PATH": os.environ["PATH"], "SERVER": server.url, "KEY": made.out.strip()}
        workers: dict[str, Any] = {
            "PATH": os.environ["PATH"],
            "DECKHANDS_URL": server.log.worker,
            "DECKHANDS_CELERY_URL": "memory://",
            "DECKHANDS_HOME": str(tmp_path / "home"),
            "LLM_MODEL": f"scripted/{script}",
        }
        async with worker("controller_worker", workers):
            answer = json.loads(await _output(["sh", "-c", request], environment))
            assert answer["summary"]["message"] == "three files"
            printed = await _output([sys.executable, "-c", program], environment)
        lines = printed.splitlines()
        assert (lines[0], lines[-1].strip()) == ("event conversation.created", "end")
        listed = deckhands(
            *("key", "ls", "--json"),
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DECKHANDS_URL": server.log.worker},
        )
        (shown,) = listed.json()
        assert (shown["name"], shown["state"], "digest" in shown) == ("shop", "good", False)
        assert shown["last_used"] is not None


async def _output(command: list[str], environment: dict[str, str]) -> str:
    running = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    printed, _ = await asyncio.wait_for(running.communicate(), unhurried(60))
    assert running.returncode == 0
    return printed.decode()
