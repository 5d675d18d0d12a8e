"""An evaluation that another command carries out: started so that it outlives this command, or followed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.runtime import OutcomeUnknown, StoreUnavailable, UsageError
from deckhands.evaluation.attempts.results import BeingWritten, Results
from deckhands.evaluation.attempts.screen import Screen
from deckhands.evaluation.attempts.standing import standing_from
from deckhands.evaluation.attempts.steering import Steering
from deckhands.evaluation.directory import RESULTS
from deckhands.evaluation.reaching import evaluation_client
from deckhands.settings import FaceSettings

LOG = "driver.log"
PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 1.0
LAST_LINES = 5


def detach(directory: Path, options: Sequence[str], *, environment: Mapping[str, str] | None = None) -> int:
    """Start a command that carries out the evaluation in a directory, and return its pid.

    It has a session to itself, so it outlives the terminal; it writes to `driver.log` there.

    Args:
        environment: of the command; None: as here.

    Raises:
        UsageError: it has ended at once; says why. One that was killed is no error: it can be started again.
    """
    log = directory / LOG
    command = [sys.executable, "-P", "-m", "deckhands", "eval", "attach", str(directory), *options]
    with log.open("ab") as out:
        begins = out.tell()
        child = subprocess.Popen(  # noqa: S603  (our own command)
            command,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            close_fds=True,
        )
    try:
        code = child.wait(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        child.returncode = 0  # it is not waited for
        return child.pid
    if code > 0:
        said = log.read_bytes()[begins:].decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise UsageError(f"The evaluation has not begun: {' '.join(said) or f'exit code {code}'}.")
    return child.pid


def follow(directory: Path, name: str, place: str) -> None:
    """Show the progress of an evaluation that another command carries out; return when that command ends."""
    asyncio.run(_follow(directory, name, place))


async def _follow(directory: Path, name: str, place: str) -> None:
    settings = FaceSettings.from_env()
    with Screen() as screen:
        while is_driven(directory):
            try:
                async with evaluation_client(settings, place) as client:
                    steering = Steering(client.store, name)
                    while is_driven(directory):
                        standing = standing_from((await steering.read()).standing)
                        if standing is not None:
                            screen.show(standing)
                        await asyncio.sleep(LOOK_SECONDS)
            except (UsageError, StoreUnavailable, OutcomeUnknown):  # its private store is not up yet, or no more
                await asyncio.sleep(LOOK_SECONDS)


def is_driven(directory: Path) -> bool:
    """Say whether a command on this machine is carrying out the evaluation in a directory."""
    try:
        with Results(directory / RESULTS):
            return False
    except BeingWritten:
        return True
