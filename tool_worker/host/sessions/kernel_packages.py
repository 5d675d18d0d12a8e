"""Runs inside a kernel, before its first cell: packages that the agent installs can be imported there.

The kernel's own environment is read-only and need not be the one of the shell. So what is installed goes where `pip`
puts it for a user (`~/.local`), by the Python that the environment was made of, and that place comes before the
kernel's own packages. A shell whose Python has the same version uses the same place.

Does not: import anything but the standard library, or leave a name in the agent's namespace.
"""

from __future__ import annotations

import importlib
import shlex
import site
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
NO_PIP = "pip is not available for the kernel's Python {version}. Install packages with bash."


class UserPackages:
    """The place of packages that a user has installed.

    Args:
        folder: It may not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed_at = 0

    def refresh(self) -> None:
        """Find what was installed since the last look, also projects that were installed for editing."""
        importlib.invalidate_caches()
        try:
            changed_at = self._folder.stat().st_mtime_ns
        except OSError:
            return
        if changed_at == self._changed_at:
            return
        self._changed_at = changed_at
        before = [path for path in sys.path if path != str(self._folder)]
        sys.path[:] = before
        site.addsitedir(str(self._folder))
        found = [path for path in sys.path if path not in before]
        place = next((n for n, path in enumerate(before) if path.endswith("-packages")), len(before))
        sys.path[:] = [*before[:place], *found, *before[place:]]


def prepare(shell: Any) -> None:
    """Let a kernel's shell find what is installed, and install by `%pip`."""
    packages = UserPackages(Path(site.getusersitepackages()))
    packages.refresh()
    shell.events.register("pre_run_cell", lambda *_: packages.refresh())
    shared = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if shared not in sys.path:  # pip takes what is there for installed
        sys.path.append(shared)

    def pip(line: str) -> None:
        """Run pip for the Python of this kernel, such as `%pip install X`."""
        command = installer()
        if command is None:
            sys.stdout.write(NO_PIP.format(version=VERSION) + "\n")
            return
        shell.system(f"{shlex.join(command)} {line}")
        packages.refresh()

    shell.register_magic_function(pip, "line", "pip")


def installer() -> list[str] | None:
    """Return the command of a pip that installs for the user; None: there is none."""
    python = Path(sys.base_prefix, "bin", f"python{VERSION}")
    bundled = sorted(Path(sys.base_prefix, "lib", f"python{VERSION}", "ensurepip", "_bundled").glob("pip-*.whl"))
    for command in ([str(python), "-m", "pip"], *([str(python), f"{wheel}/pip"] for wheel in bundled)):
        with suppress(OSError):
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:  # noqa: S603
                return command
    return None
