"""The command that stops another one, in a real shell."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deckhands.server.openhands.bash_commands import make_stop_command


async def test_stop_waits_for_a_command_that_starts_after_it(tmp_path: Path) -> None:
    note = tmp_path / "note"
    stopping = await asyncio.create_subprocess_exec("bash", "-c", make_stop_command(str(note)))
    started = await asyncio.create_subprocess_exec("bash", "-c", f"echo $$ > {note}; exec sleep 600")
    assert await stopping.wait() == 0
    assert await started.wait() == -9
