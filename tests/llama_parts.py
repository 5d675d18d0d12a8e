"""A llama.cpp server in its own environment, and the settings of workers that call it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.polling import unhurried
from tests.rollout_parts import RETRIES

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build/llama-venv/bin/python"
MISSING = "run benchmarks/peer/llama.sh to install llama.cpp"
MODEL = "openai/tiny"


@contextmanager
def serve_llama(folder: Path) -> Iterator[str]:
    """Write the tiny model into a folder, as `tiny.gguf`, and serve it; yield the server's address."""
    program = ROOT / "benchmarks/peer/llama_server.py"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        assert address, (folder / "log").read_text()
        yield address
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(unhurried(20))
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def make_environment(address: str) -> dict[str, str]:
    """Return the settings of workers that call a server."""
    return {
        "LLM_MODEL": MODEL,
        "LLM_BASE_URL": f"{address}/v1",
        "LLM_API_KEY": "none",
        "LLM_ROLLOUT_API": "llama_cpp",
        "LLM_TEMPERATURE": "1",
        **RETRIES,
    }


def force_call(tool: str, argument: str) -> str:
    """Return a grammar in which each reply is a call of a tool with a few random words."""
    return rf'root ::= "<function={tool}>\n<parameter={argument}>" [a-z ]{{1,30}} "</parameter>\n</function>"'
