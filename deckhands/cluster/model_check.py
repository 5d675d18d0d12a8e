"""Checks models before a cluster starts, by a separate process with the controller's code."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

from broker.runtime import UsageError

PROGRAM = "controller_worker.model.model_check"
LIMIT_SECONDS = 120.0
"""litellm, which knows further names, takes up to 30 s to import on a busy machine."""


async def check_models(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Reject models that no controller worker with this environment can call.

    Does nothing if the process fails or takes too long: the worker will report the cause.

    Args:
        names: the models; an empty name is the default one, if there is one.

    Raises:
        UsageError: a model is unknown or has no key, its script is broken, or a setting cannot be used.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "utf8", "-P", "-m", PROGRAM, *names),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        env=dict(environment),
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            out, _ = await process.communicate()
        found = json.loads(out)
    except (TimeoutError, ValueError):
        return
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if "error" in found:
        raise UsageError(found["error"], remedy=found["remedy"])
