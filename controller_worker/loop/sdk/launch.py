"""The start of a session's program: with a clean environment, and in a sandbox if bubblewrap works.

Holds: the program inherits no variable, no descriptor but its socket, and no directory of ours. In the sandbox it has
the system's programs, the interpreter's packages and this package, all read-only, an empty `/tmp`, no network but its
own loopback, and ends with its worker.
Does not: limit memory; a worker limits the number of programs.
"""

from __future__ import annotations

import functools
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
ENVIRONMENT = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
TRIAL_LIMIT_SECONDS = 10.0

_OWN = Path(__file__).parent
_LIBRARIES = ("bin", "sbin", "lib", "lib32", "lib64")


PROGRAM = (sys.executable, "-I", "-m", f"{__package__}.program")


def make_command(program: Sequence[str], descriptor: int, *, is_sandboxed: bool) -> Sequence[str]:
    """Return the command that starts the program of a session.

    Args:
        program: `PROGRAM`, or another one with the same protocol.
        descriptor: of its socket, the same in the child.
    """
    command = [*program, str(descriptor)]
    return [*_make_sandbox_command(), "--", *command] if is_sandboxed else command


@functools.cache
def can_sandbox() -> bool:
    """Return whether bubblewrap is installed and works; tried once."""
    if shutil.which("bwrap", path=SYSTEM_PATH) is None:
        return False
    trial = [*_make_sandbox_command(), "--", sys.executable, "-I", "-c", "pass"]
    try:
        tried = subprocess.run(trial, env={}, capture_output=True, timeout=TRIAL_LIMIT_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _make_sandbox_command() -> Sequence[str]:
    found = shutil.which("bwrap", path=SYSTEM_PATH) or "bwrap"
    return [
        found,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sdk"),
        *("--cap-drop", "ALL", "--new-session", "--die-with-parent"),
        *("--ro-bind", "/usr", "/usr", *_find_system_mounts(), "--proc", "/proc", "--dev", "/dev"),
        *("--tmpfs", "/tmp", *_find_package_mounts(), "--remount-ro", "/", "--chdir", "/tmp"),  # noqa: S108  (mounts of the sandbox)
    ]


def _find_system_mounts() -> Iterator[str]:
    for name in _LIBRARIES:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def _find_package_mounts() -> Iterator[str]:
    """Yield the mounts of the interpreter, of its packages, and of this package as the only one of ours."""
    places = {Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parent.parent}
    places |= {Path(place) for place in site.getsitepackages()}
    kept = [place for place in sorted(places) if place.is_dir() and not place.is_relative_to("/usr")]
    for place in kept:
        if not any(place != other and place.is_relative_to(other) for other in kept):
            yield from ("--ro-bind", str(place), str(place))
    if not any(_OWN.is_relative_to(place) for place in (*kept, Path("/usr"))):
        face = _OWN.parent / "__init__.py"
        for place in (_OWN.parents[1] / "__init__.py", face, face.with_suffix(".pyi"), _OWN):
            yield from ("--ro-bind", str(place), str(place))
