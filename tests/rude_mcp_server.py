"""An MCP server without manners, for the tests: what it does wrong is its argument."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

OUT = sys.stdout.buffer
TOOL: dict[str, Any] = {"name": "rude", "description": "Answers.", "inputSchema": {"type": "object", "properties": {}}}


def send(asked: dict[str, Any], result: dict[str, Any]) -> None:
    OUT.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode() + b"\n")
    OUT.flush()


def main(manner: str) -> None:
    if manner == "babbles":
        OUT.write(b"\x00\xff\xfe no message\n" * 1000)
    if manner == "mute":
        signal.pause()
    for line in sys.stdin:
        asked = json.loads(line)
        match asked.get("method"):
            case "initialize":
                version = asked["params"]["protocolVersion"]
                server = {"name": "rude", "version": "1"}
                send(asked, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})
            case "tools/list":
                again = [{**TOOL, "description": "Answers otherwise."}] if manner == "repeats" else []
                send(asked, {"tools": [TOOL, *again]})
            case "tools/call" if manner == "endless":
                while True:
                    OUT.write(b"y" * 65536)
            case "tools/call":
                text = "y" * 12_000_000 if manner == "long" else "fine"
                send(asked, {"content": [{"type": "text", "text": text}]})
            case "ping":
                send(asked, {})


if __name__ == "__main__":
    main(sys.argv[1])
