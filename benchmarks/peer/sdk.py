"""OpenHands' SDK as a process that takes orders; see driver.py, which runs inside it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "peer-venv" / "bin" / "python"
SETUP_LIMIT_SECONDS = 900.0
ANSWER_LIMIT_SECONDS = 600.0
STOP_LIMIT_SECONDS = 20.0


class Sdk:
    """A running driver.

    Attributes:
        version: of `openhands-sdk`.
        pid: of the process that does the work.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.version = ""
        self.pid = process.pid

    @classmethod
    async def start(cls, log: Path) -> Sdk:
        """Start the driver under the peer's interpreter; importing the SDK takes 5 to 30 seconds.

        Raises:
            OSError: it is not installed.
        """
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                PYTHON,
                str(Path(__file__).with_name("driver.py")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                limit=64 * 1024 * 1024,
            )
        sdk = cls(process)
        sdk.version = (await sdk.ask("hello"))["version"]
        return sdk

    async def ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        """Have a piece of work done; see driver.py for what there is and what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"work": work} | arguments).encode() + b"\n")
        async with asyncio.timeout(ANSWER_LIMIT_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The SDK's driver ended with status {await self._process.wait()} at {work}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        """End it: it returns when its standard input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def set_up() -> str:
    """Install the SDK if it is not there; return why that was not possible, or an empty text."""
    try:
        done = subprocess.run(
            [Path(__file__).with_name("setup.sh")],
            capture_output=True,
            text=True,
            timeout=SETUP_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["set-up failed"])[-1]
