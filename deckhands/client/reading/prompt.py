"""Rebuilds the prompt of a model call from a log, by a separate process with the controller's code.

The process gets only the log, none of our settings and secrets. Its time and the log's length are limited, because a
log may come from an untrusted source.
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
    """Return the prompt of a model after these events, which are the first ones of a log, with whole texts.

    Raises:
        UsageError: there is no prompt at this point, or the log is too long.
        PromptFailed: the process failed, or took too long.
    """
    log = await asyncio.to_thread(_render, events)
    if len(log) > MAX_LOG_BYTES:
        raise UsageError("The log is too long to make its prompt again.", remedy="Choose an earlier event.")
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, "-X", "utf8", "-P", "-m", PROGRAM)
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=read_plain_environment()
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            out, _ = await process.communicate(log)
    except TimeoutError as error:
        raise PromptFailed(
            f"The prompt took more than {LIMIT_SECONDS:.0f} s.", remedy="Try again later, or choose an earlier event."
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError as error:
        raise PromptFailed(
            f"The process that makes prompts ended with {process.returncode}.",
            remedy="Run `deckhands doctor`: the package controller_worker has to be installed here.",
        ) from error
    if "error" in found:
        raise UsageError(found["error"], remedy=found["remedy"])
    return found


def _render(events: Sequence[Event]) -> bytes:
    return "".join(f"{render_event_line(event)}\n" for event in events).encode()
