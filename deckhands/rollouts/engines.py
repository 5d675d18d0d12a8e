"""Pause and resume the engines of a run, by vLLM's routes `/pause` and `/resume`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from broker.runtime import DeckhandsError

LIMIT_SECONDS = 600.0
MODES = {"drain": "wait", "keep": "keep", "abort": "abort"}


class EngineFailed(DeckhandsError):
    """An engine did not follow a request."""

    code = "engine_failed"


async def pause_engines(engines: Sequence[str], mode: Literal["drain", "keep", "abort"]) -> None:
    """Pause engines; with `drain`, until no reply is in flight.

    Raises:
        EngineFailed: an engine cannot be reached, or refuses.
    """
    await asyncio.gather(*(_post(f"{one.rstrip('/')}/pause?mode={MODES[mode]}") for one in engines))


async def resume_engines(engines: Sequence[str]) -> None:
    """Resume engines; raises EngineFailed."""
    await asyncio.gather(*(_post(f"{one.rstrip('/')}/resume") for one in engines))


async def _post(url: str) -> None:
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(total=LIMIT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, allow_redirects=False) as reply:
            if reply.status != 200:
                raise EngineFailed(f"The engine answers {reply.status} to {url}.", remedy="Check its address and mode.")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineFailed(f"The engine does not answer at {url}: {error!r}.", remedy="Check that it runs.") from error
