"""The log of `deckhands serve`: every line of it, also of the libraries, has the format that was asked for."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from broker.runtime.child import ChildProcess
from tests.polling import until
from tests.stores import RealServer, emptied

LIMIT_SECONDS = 60.0


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
    await until(lambda: "startup complete" in log.read_text(), limit=LIMIT_SECONDS, what="a server")
    os.kill(server.pid, signal.SIGTERM)
    await server.stop(grace_seconds=20)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["role"] for line in lines} == {"server"}
    assert {"deckhands.cli.commands.gateway", "mcp.server.streamable_http_manager"} <= {
        line["logger"] for line in lines
    }
    assert any("Serving at http://127.0.0.1:" in line["message"] for line in lines)
