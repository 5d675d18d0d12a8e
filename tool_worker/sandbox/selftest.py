"""The self-test of a sandbox: a few escape attempts before it is used.

Holds: each probe has an existing target, so a failed probe proves confinement and not a missing target.
Does not: prove that a sandbox is secure. It detects a missing or misconfigured one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tool_worker.errors import SandboxUnavailable, SandboxUnsafe
from tool_worker.sandbox.sandbox import Enclosure, Sandbox, find_interpreter
from tool_worker.sandbox.spawning import open_in_memory

LIMIT_SECONDS = 20.0
LEFT_SECONDS = 600.0
"""An older directory belongs to a killed worker, not to a running self-test."""
_PREFIX = "deckhands-selftest-"
_PROBES = Path(__file__).with_name("probes.py")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One attempt. `reached` names the thing that it reached; None if it was stopped."""

    name: str
    reached: str | None


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The results of all attempts."""

    sandbox: str
    results: tuple[ProbeResult, ...]

    @property
    def escapes(self) -> tuple[ProbeResult, ...]:
        """The attempts that succeeded."""
        return tuple(result for result in self.results if result.reached is not None)


def run_self_test(sandbox: Sandbox, files: Path | None = None) -> SelfTestReport:
    """Try to escape from a sandbox. Takes about 0.1 s, and with containers as long as one starts.

    Args:
        files: Existing directory for the test's own files, where the sandbox can show them; None for the machine's
            /tmp.

    Raises:
        SandboxUnavailable: the probes could not run in it.
    """
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=files) as folder,
        _set_up_targets(Path(folder), sandbox.forbidden_addresses()) as settings,
    ):
        _remove_left(Path(folder).parent, Path(folder).lstat().st_mtime - LEFT_SECONDS)
        workspace = Path(folder, "workspace")
        workspace.mkdir()
        probes = workspace / _PROBES.name
        probes.write_bytes(_PROBES.read_bytes())
        mount_at = "/workspace" if sandbox.capabilities.confines_programs else str(workspace)
        program = [find_interpreter(), "-I", "-S", f"{mount_at}/{probes.name}", json.dumps(settings)]
        enclosure = Enclosure(workspace, mount_at, is_own=True, labels={"host": settings["argument"]})
        limit_seconds = max(LIMIT_SECONDS, sandbox.capabilities.start_limit_seconds)
        try:
            ended = run_confined(sandbox, program, enclosure, limit_seconds)
            reached = json.loads(ended.stdout)
        except subprocess.CalledProcessError as error:
            raise _make_not_run(sandbox, error.stderr.decode("utf-8", "replace").strip()) from error
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            sandbox.kill_stragglers(settings["argument"])
            raise _make_not_run(sandbox, str(error)) from error
    return SelfTestReport(sandbox.name, tuple(ProbeResult(name, target) for name, target in reached.items()))


def run_confined(
    sandbox: Sandbox, program: Sequence[str], enclosure: Enclosure, limit_seconds: float = LIMIT_SECONDS
) -> subprocess.CompletedProcess[bytes]:
    """Run a program as a host would be run, without an environment. Return its output.

    Raises:
        subprocess.SubprocessError, OSError: it could not start, failed, or did not end within the limit.
    """
    with ExitStack() as closing:
        descriptor = open_in_memory(closing, sandbox.system_call_filter)
        return subprocess.run(  # noqa: S603  (our own interpreter and our own program)
            sandbox.command(program, sandbox.options(enclosure), descriptor),
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=limit_seconds,
            pass_fds=[descriptor],
        )


def require_safe(report: SelfTestReport) -> None:
    """Reject a sandbox that a probe escaped from.

    Raises:
        SandboxUnsafe: a probe escaped.
    """
    if report.escapes:
        found = ", ".join(f"{result.name} ({result.reached})" for result in report.escapes)
        raise SandboxUnsafe(f"The sandbox {report.sandbox} failed its self-test: {found}.")


def _make_not_run(sandbox: Sandbox, reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"The self-test cannot run in the sandbox {sandbox.name}: {reason}")


def _remove_left(files: Path, newest: float) -> None:
    """Remove the directories of killed workers that were created up to this time of the file system's clock."""
    for left in files.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = left.lstat()
            if found.st_uid == os.getuid() and found.st_mtime <= newest:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _set_up_targets(folder: Path, addresses: Sequence[str]) -> Iterator[dict[str, str]]:
    """Create the probes' targets, besides given addresses: a process with a secret, a file and a listening port."""
    canary = secrets.token_hex(16)
    argument = secrets.token_hex(16)
    outside = folder / "outside"
    outside.touch()
    waiting = [find_interpreter(), "-I", "-S", "-c", "import sys; sys.stdin.read()", argument]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(waiting, stdin=subprocess.PIPE, env={"SECRET": canary}) as target,  # noqa: S603
    ):
        yield {
            "canary": canary,
            "argument": argument,
            "outside": str(outside),
            "addresses": " ".join([f"127.0.0.1:{listener.getsockname()[1]}", *addresses]),
        }
        target.communicate(timeout=LIMIT_SECONDS)
