"""Starts a session program in a container, with the Python and the packages of its image: `image_start.py <tool>`.

Holds: if the image lacks a requirement, every call is answered with its name.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tool_worker.host.sessions.programs import CHROMIUM_NAMES, PROGRAMS, find_chromium
from tool_worker.host.sessions.session_wire import Result, serve


def main() -> None:
    """Become the program, or answer every call with the missing requirements."""
    tool = sys.argv[1]
    program = PROGRAMS[tool]
    lacking = [f"the Python package {package}" for package in program.missing]
    arguments: list[str] = []
    if program.has_chromium:
        chromium = find_chromium()
        lacking += [] if chromium else [f"a program {' or '.join(CHROMIUM_NAMES)}"]
        arguments = [chromium or ""]
    if lacking:
        asyncio.run(_refuse(tool, " and ".join(lacking)))
        return
    file = str(Path(__file__).resolve().parents[2] / program.file)
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


async def _refuse(tool: str, lacking: str) -> None:
    text = (
        f"ERROR: {tool} cannot run in this container: its image lacks {lacking}. "
        "Do the work by other tools, or ask for an image that has it."
    )

    async def refuse(_: object) -> Result:
        return {"content": text, "is_error": True}

    async def interrupt() -> None:
        """Do nothing: no call is running."""

    await serve(refuse, interrupt)


if __name__ == "__main__":
    main()
