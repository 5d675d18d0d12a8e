"""Access of an SDK agent's program to the controller's machine: no variable, no file, no network.

Its CLI is a third-party program. A probe takes its place, in the same sandbox, started the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from controller_worker.loop.sdk.runner import Line, SdkRunner, can_sandbox

PROBE = """
import json, os, socket, sys
said = socket.socket(fileno=int(sys.argv[2]))
asked = json.loads(sys.argv[1])
def can(do, *arguments):
    try:
        do(*arguments)
    except OSError:
        return False
    return True
found = {
    "files": [path for path in asked["files"] if os.path.exists(path)],
    "written": [path for path in asked["written"] if can(open, path + "/probe", "w")],
    "reached": [port for port in asked["ports"] if can(socket.create_connection, ("127.0.0.1", port), 2)],
    "variables": dict(os.environ),
    "descriptors": [name for name in os.listdir("/proc/self/fd") if name not in ("0", "1", "2", sys.argv[2])],
    "programs": [name for name in os.listdir("/proc") if name.isdigit()],
}
said.sendall(json.dumps(found).encode() + b"\\n")
"""


async def probed(asked: dict[str, Any], *, is_sandboxed: bool) -> dict[str, Any]:
    said: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
    endings: set[asyncio.Task[None]] = set()
    runner = SdkRunner(on_line=said.set_result, on_end=lambda _: None, endings=endings)
    await runner.start((sys.executable, "-I", "-c", PROBE, json.dumps(asked)), is_sandboxed=is_sandboxed)
    try:
        return dict(await asyncio.wait_for(said, 30.0))
    finally:
        runner.stop()
        while endings:
            await asyncio.wait(endings)


async def test_the_sandbox_holds_nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_sandbox()
    monkeypatch.setenv("LLM_API_KEY", "canary-key")
    secret = tmp_path / "secret"
    secret.write_text("canary")
    root = Path(__file__).parents[2]
    roots = [] if root.is_relative_to("/tmp") else [str(root)]  # a sandbox has a separate /tmp
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = {
            "files": [str(secret), "/etc/shadow", "/var", "/srv", str(root / "pyproject.toml"), str(root / "broker")],
            "written": ["/", "/usr", *roots, str(Path(sys.prefix)), "/etc"],
            "ports": [listener.getsockname()[1]],
        }
        found = await probed(asked, is_sandboxed=True)
    assert found["files"] == found["written"] == found["reached"] == []
    assert "canary-key" not in json.dumps(found["variables"])
    assert set(found["variables"]) <= {"PATH", "LANG", "HOME", "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE"}
    assert len(found["descriptors"]) <= 1  # the listing itself
    assert str(os.getpid()) not in found["programs"] or len(found["programs"]) <= 3


async def test_without_a_sandbox_it_still_inherits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_API_KEY", "canary-key")
    kept = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(kept, True)
    try:
        found = await probed({"files": [], "written": [], "ports": []}, is_sandboxed=False)
    finally:
        os.close(kept)
    assert "canary-key" not in json.dumps(found["variables"])
    assert len(found["descriptors"]) <= 1
