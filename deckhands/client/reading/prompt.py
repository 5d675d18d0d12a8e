"""The prompt of a model call, made again from a log by a process of the controller's code.

That process gets the log only: no setting and no secret of ours. Its time and the log's length are limited, because the
log of a stranger may take long.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from broker.contract import Event
from broker.log import render_event_line
from broker.runtime import DeckhandsError, UsageError
from deckhands.settings import read_plain_environment

PROGRAM = "controller_worker.loop.prompt_at"
LIMIT_SECONDS = 60.0
MAX_LOG_BYTES = 64 * 2**20


class PromptFailed(DeckhandsError):
    """The process that makes prompts ended without an answer."""

    code = "prompt_failed"


async def make_prompt(events: Sequence[Event]) -> dict[str, Any]:
    """Return the prompt that a model gets after these events, the start of a log with whole texts.

    Raises:
        UsageError: there is none at this point, or the log is too long.
        PromptFailed: the process failed, or took too long.
    """
    log = "".join(f"{render_event_line(event)}\n" for event in events).encode()
    if len(log) > MAX_LOG_BYTES:
        raise UsageError("The log is too long to make its prompt again.", remedy="Choose an earlier event.")
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, "-P", "-m", PROGRAM)
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=read_plain_environment()
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            out, _ = await process.communicate(log)
    except TimeoutError as error:
        raise PromptFailed(f"The prompt took more than {LIMIT_SECONDS:.0f} s.") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError as error:
        raise PromptFailed(f"The process that makes prompts ended with {process.returncode}.") from error
    if "error" in found:
        raise UsageError(found["error"], remedy=found["remedy"])
    return found
