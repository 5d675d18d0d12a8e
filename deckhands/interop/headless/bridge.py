"""The bridge for programs that run a headless task in a separate process.

Holds: if the process of the bridge dies for any reason, the run stops its workers cleanly. `Bridge.run` returns a
summary for every end of a run.
Does not: trust the agent's report: success needs the exit code 0 and a result that fulfils the contract. If the bridge
and the run are killed at once, running commands end with the time to live of their workspace.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.runtime import SYSTEM_CLOCK, ChildProcess, Clock, DeckhandsError, UsageError
from deckhands.client import ExitCode
from deckhands.interop.headless.contract import (
    MAX_ITERATIONS,
    MAX_SECONDS,
    REASONS,
    Contract,
    HeadlessExit,
    experiment_id,
)
from deckhands.interop.headless.inside import PathDenied
from deckhands.interop.headless.permitted_folders import PermittedFolders, read_denied_paths
from deckhands.settings import CliSettings

COMMAND = (sys.executable, "-P", "-m", "deckhands.headless")
TAIL_BYTES = 4_000
GRACE_SECONDS = 60.0
STOP_SECONDS = 30.0
"""How long an interrupted run may take to stop before it is killed."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run.

    Attributes:
        success: the agent has finished, and its result fulfils the contract.
        exit_code: of the process; negative for a signal.
        artifacts: the files of the results and the logs, as absolute paths.
        reason: `finished`, `error`, `usage`, `rejected`, `out_of_time`, `needs_person`, `limit_reached`,
            `interrupted`, `missing_artifact`, `path_denied` or `killed`.
        stdout_tail: the end of the process's output, including errors.
        denied_paths: up to ten files that were changed outside of the permitted folders, relative to the workspace.
    """

    success: bool
    exit_code: int
    duration_seconds: float
    artifacts: tuple[Path, ...]
    reason: str
    stdout_tail: str
    denied_paths: tuple[str, ...] = ()


class Bridge:
    """Runs tasks headless in workspaces below a directory.

    Args:
        root: workspaces outside of it are refused.
        environment: the environment of the runs; None for that of this process.
        command: the command to launch.
        grace_seconds: how much longer than its own limit a run may take, to start and to stop cleanly.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        grace_seconds: float = GRACE_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.root = Path(root)
        self._environment = environment
        self._command = tuple(command)
        self._grace_seconds = grace_seconds
        self._clock = clock

    def run(
        self,
        task: str,
        *,
        name: str | None = None,
        workspace: Path | str = ".",
        max_iterations: int = MAX_ITERATIONS,
        timeout_seconds: float = MAX_SECONDS,
        permit: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> RunSummary:
        """Run a task, wait for its end, and return its summary.

        Args:
            name: the name of the experiment; None for a new one.
            workspace: relative to the root.
            timeout_seconds: after this time the run is stopped, and killed if it does not stop.
            permit: the folders of the workspace that the run may change, relative to it; empty for all. README.md,
                experiments and logs are always permitted.
            arguments: further arguments of `python -m deckhands.headless`.
        """
        began = self._clock.monotonic()
        try:
            experiment = experiment_id(name)
            contract = Contract(self._workspace(workspace), experiment)
            PermittedFolders.parse(contract.root, permit)
            environment = CliSettings.from_env().environment if self._environment is None else self._environment
        except PathDenied as error:
            return self._build_refusal(error, HeadlessExit.PATH_DENIED)
        except DeckhandsError as error:
            return self._build_refusal(error, ExitCode.USAGE)
        options = ["-n", experiment, "-d", str(contract.root), "-i", str(max_iterations)]
        options += ["--timeout", str(timeout_seconds), *(f"--permit={folder}" for folder in permit), *arguments]
        with tempfile.TemporaryDirectory(prefix="deckhands-bridge-") as folder:
            file, log = Path(folder, "task"), Path(folder, "output")
            file.write_text(task, encoding="utf-8")
            code, is_killed = self._run_command([*options, "-f", str(file)], log, environment, timeout_seconds)
            output = _read_tail(log)
        return self._summary(contract, code, output, self._clock.monotonic() - began, is_killed=is_killed)

    def _workspace(self, workspace: Path | str) -> Path:
        """Return the directory of a workspace, without links.

        Raises:
            PathDenied: the directory is not below the root.
        """
        root = self.root.resolve()
        path = (root / workspace).resolve()
        if not path.is_relative_to(root):
            raise PathDenied(
                f"The workspace {ascii(str(workspace))[:300]} is not inside {root}.",
                remedy="Name a directory below the root of the bridge.",
            )
        return path

    def _run_command(
        self, options: Sequence[str], log: Path, environment: Mapping[str, str], limit_seconds: float
    ) -> tuple[int, bool]:
        """Run the command, and return its exit code, and whether the bridge's time limit was reached."""
        # When the bridge's process ends, the run gets the signal at which it stops its workers cleanly.
        child = ChildProcess.start([*self._command, *options], log=log, env=environment, last_signal=signal.SIGTERM)
        watch = os.pidfd_open(child.pid)
        try:
            has_ended = _wait_for_exit(watch, limit_seconds + self._grace_seconds)
            if not has_ended:
                _stop(child, watch)
        except BaseException:  # such as KeyboardInterrupt: end started processes before the caller continues
            _stop(child, watch)
            raise
        finally:
            os.close(watch)
        return child.exit_status or 0, not has_ended

    def _summary(self, contract: Contract, code: int, output: str, seconds: float, *, is_killed: bool) -> RunSummary:
        artifacts, denied = tuple[Path, ...](), tuple[str, ...]()
        try:
            artifacts = tuple(contract.root / path for path in contract.artifacts())
            if code == HeadlessExit.PATH_DENIED:
                denied = read_denied_paths(contract)
            if code == ExitCode.FINISHED and (fault := contract.find_fault()):
                code, output = HeadlessExit.MISSING_ARTIFACT, f"{output}{fault}\n"
        except PathDenied as error:
            code, output = HeadlessExit.PATH_DENIED, f"{output}{error.message}\n"
        except DeckhandsError as error:
            code, output = ExitCode.ERROR, f"{output}{error.message}\n"
        reason = REASONS.get(code, "error")
        if is_killed:
            reason = "out_of_time"
        elif code < 0:
            reason = "killed"
        return RunSummary(
            code == ExitCode.FINISHED, int(code), seconds, artifacts, reason, output[-TAIL_BYTES:], denied
        )

    @staticmethod
    def _build_refusal(error: UsageError | DeckhandsError, code: int) -> RunSummary:
        return RunSummary(False, int(code), 0.0, (), REASONS[code], f"{error}\n")


def _read_tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def _stop(child: ChildProcess, watch: int) -> None:
    """Ask a run to stop cleanly, and kill it if it does not."""
    child.send(signal.SIGTERM)
    if not _wait_for_exit(watch, STOP_SECONDS):
        child.send(signal.SIGKILL)
        _wait_for_exit(watch, None)


def _wait_for_exit(watch: int, limit_seconds: float | None) -> bool:
    """Wait for the end of a process, given as a pidfd, and return whether it ended; None for no limit."""
    waiting = select.poll()
    waiting.register(watch, select.POLLIN)
    return bool(waiting.poll(None if limit_seconds is None else limit_seconds * 1_000))
