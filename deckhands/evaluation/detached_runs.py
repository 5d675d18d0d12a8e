"""Start an evaluation in a detached process that outlives this command, or follow such a process.

It also interprets `--redo`, which repeats finished attempts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from broker.runtime import OutcomeUnknown, StoreUnavailable, UsageError
from deckhands.evaluation.attempts.results import OUTCOMES, Results, ResultsInUse
from deckhands.evaluation.attempts.status import ProgressScreen, parse_status
from deckhands.evaluation.attempts.steering import EvaluationSteering, Requeue
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.directory import RESULTS
from deckhands.evaluation.store_access import evaluation_client
from deckhands.settings import CliSettings

LOG = "driver.log"
PATIENCE_SECONDS = 3.0
POLL_SECONDS = 1.0
LAST_LINES = 5


def detach(directory: Path, options: Sequence[str], *, environment: Mapping[str, str] | None = None) -> int:
    """Start a command that runs the evaluation of a directory, and return its pid; see `start_in_background`."""
    return start_in_background(
        directory, "evaluation", "eval", "attach", str(directory), *options, environment=environment
    )


def start_in_background(
    directory: Path, what: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> int:
    """Start a command of `deckhands` that drives a run, and return its pid.

    It has its own session, so it outlives the terminal; it writes to `driver.log` in the directory.

    Args:
        what: the kind of run, for the error.
        environment: the environment of the command; None for that of this process.

    Raises:
        UsageError: the command ended at once; the text has the reason. Not raised if it was killed, because it can be
            restarted.
    """
    log = directory / LOG
    with log.open("ab") as out:
        begins = out.tell()
        child = subprocess.Popen(  # noqa: S603  (our own command)
            [sys.executable, "-P", "-m", "deckhands", *arguments],
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
        raise UsageError(f"The {what} has not started: {' '.join(said) or f'exit code {code}'}.")
    return child.pid


def follow(directory: Path, name: str, place: str) -> None:
    """Show the progress of an evaluation that another command runs; return when that command ends."""
    asyncio.run(_follow(directory, name, place))


async def _follow(directory: Path, name: str, place: str) -> None:
    settings = CliSettings.from_env()
    with ProgressScreen() as screen:
        while is_driven(directory):
            try:
                async with evaluation_client(settings, place) as client:
                    steering = EvaluationSteering(client.store, name)
                    while is_driven(directory):
                        status = parse_status((await steering.read()).status)
                        if status is not None:
                            screen.show(status)
                        await asyncio.sleep(POLL_SECONDS)
            # its private store is not running yet, or has stopped
            except (UsageError, StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(POLL_SECONDS)


def is_driven(directory: Path) -> bool:
    """Return whether a command on this machine is running the evaluation of a directory."""
    try:
        with Results(directory / RESULTS):
            return False
    except ResultsInUse:
        return True


redo_option = click.option(
    "--redo", multiple=True, metavar="OUTCOME|ID",
    help="Repeat attempts with this outcome, or at this instance. May be given several times.",
)  # fmt: skip


def check_redo(redo: Iterable[str], instances: Iterable[Instance]) -> None:
    """Refuse a word that is neither an outcome nor an instance.

    Raises:
        UsageError: a word is neither; the text names it.
    """
    known = {*OUTCOMES, *(one.id for one in instances)}
    for what in redo:
        if what not in known:
            raise UsageError(
                f"--redo {what!r} is neither an outcome nor an instance of the dataset.",
                remedy=f"Write one of {', '.join(OUTCOMES)}, or the id of an instance.",
            )


def build_orders(redo: Sequence[str]) -> list[Requeue]:
    """Return the orders to repeat attempts; an attempt that several orders match is repeated once."""
    outcomes = tuple(what for what in redo if what in OUTCOMES)
    instances = tuple(what for what in redo if what not in OUTCOMES)
    orders = [Requeue(outcomes=outcomes)] if outcomes else []
    return orders + ([Requeue(instances=instances)] if instances else [])
