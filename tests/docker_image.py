"""The image of tests with containers: this machine's bash and Python with their libraries, and nothing else."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.distributions import needed_by
from tool_worker.sandbox.sandbox import find_interpreter

PROGRAMS = ("bash", "sh", "cat", "curl", "env", "grep", "head", "id", "ls", "mkdir", "rm", "sleep", "touch")
LEFT_OUT = {"site-packages", "test", "__pycache__", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo"}
_LINKED = re.compile(r"(/\S+) \(0x")


@cache
def image(*packages: str) -> str:
    """Return the image's name; the first time on a machine this makes it, in some seconds.

    Args:
        packages: those of our Python, with their requirements.
    """
    python = Path(find_interpreter())
    told = f"{python}{sys.version}{' '.join(packages)}"
    name = f"deckhands-test:{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if not subprocess.run(["docker", "image", "ls", "-q", name], capture_output=True, check=True).stdout.strip():
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            _pack(tar, python, packages)
        subprocess.run(["docker", "import", "-", name], input=packed.getvalue(), capture_output=True, check=True)
    return name


def _files_of(packages: Iterable[str]) -> dict[str, Path]:
    """Return the files of packages and their requirements, by their path in the image's Python."""
    folder = Path(sysconfig.get_path("stdlib"), "site-packages")
    return {
        str(folder / file): Path(str(found.locate_file(file)))
        for found in needed_by(*packages).values()
        for file in found.files or ()
        if ".." not in file.parts and file.suffix != ".pyc"
    }


def _pack(tar: tarfile.TarFile, python: Path, packages: Iterable[str]) -> None:
    standard = Path(sysconfig.get_path("stdlib"))
    programs = {f"/bin/{name}": shutil.which(name) for name in PROGRAMS}
    files = {target: Path(found).resolve() for target, found in programs.items() if found}
    files |= {str(python): python}
    for path in standard.rglob("*"):
        if path.is_file() and not LEFT_OUT & set(path.relative_to(standard).parts) and path.suffix != ".a":
            files[str(path)] = path.resolve()
    files |= _files_of(packages)
    linked = [
        str(path) for target, path in files.items() if path.suffix == ".so" or not target.startswith(str(standard))
    ]
    printed = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    files |= {found: Path(found).resolve() for found in _LINKED.findall(printed)}
    for target, path in sorted(files.items()):
        tar.add(path, target.lstrip("/"), recursive=False)
    link = tarfile.TarInfo("bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, str(python)
    tar.addfile(link)
