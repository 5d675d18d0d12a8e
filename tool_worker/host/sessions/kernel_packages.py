"""Runs in a kernel before its first cell, so that the kernel can import packages that the agent installs.

The kernel's own environment is read-only and may differ from the shell's. So packages are installed in pip's user
directory (`~/.local`) by the base Python of the environment, and that directory comes before the kernel's own packages
on the path. A shell whose Python has the same version uses the same directory.

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
    """The directory of user-installed packages.

    Args:
        folder: It may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed_at = 0

    def refresh(self) -> None:
        """Add packages that were installed since the last call to the path, including editable installs."""
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
    """Make installed packages importable in a kernel's shell, and add the command `%pip`."""
    packages = UserPackages(Path(site.getusersitepackages()))
    packages.refresh()
    shell.events.register("pre_run_cell", lambda *_: packages.refresh())
    shared = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if shared not in sys.path:  # pip treats packages in this folder as installed
        sys.path.append(shared)

    def pip(line: str) -> None:
        """Run pip for this kernel's Python, for example `%pip install X`."""
        command = find_installer()
        if command is None:
            sys.stdout.write(NO_PIP.format(version=VERSION) + "\n")
            return
        shell.system(f"{shlex.join(command)} {line}")
        packages.refresh()

    shell.register_magic_function(pip, "line", "pip")


def find_installer() -> list[str] | None:
    """Return the command of a pip that can install for the user; None if there is none."""
    python = Path(sys.base_prefix, "bin", f"python{VERSION}")
    bundled = sorted(Path(sys.base_prefix, "lib", f"python{VERSION}", "ensurepip", "_bundled").glob("pip-*.whl"))
    for command in ([str(python), "-m", "pip"], *([str(python), f"{wheel}/pip"] for wheel in bundled)):
        with suppress(OSError):
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:  # noqa: S603
                return command
    return None
