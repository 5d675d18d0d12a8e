"""Turns of scripted models, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A turn that calls one tool."""
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def bash(command: str, **arguments: Any) -> dict[str, Any]:
    """A turn that runs a command."""
    return call("execute_bash", command=command, **arguments)


def finish(message: str = "done", **arguments: Any) -> dict[str, Any]:
    """A turn that finishes."""
    return call("finish", message=message, **arguments)


def script(path: Path, *turns: dict[str, Any], latency_seconds: float = 0.0) -> str:
    """Write the script of a model and return the model's name."""
    path.write_text(json.dumps({"latency_seconds": latency_seconds, "turns": turns}))
    return f"scripted/{path}"
