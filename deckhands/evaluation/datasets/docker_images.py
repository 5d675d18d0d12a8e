"""Repositories in images of this machine's Docker engine, as SWE-bench's harness builds and publishes them.

An image has the repository in `/testbed`, at the commit of its instance, with its dependencies installed. Attempts and
checks run in containers of the image.

Holds: no image is pulled, and nothing of an image runs here: its files are copied out of a container that never starts.
Git history is not copied into a workspace.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from broker.runtime import UsageError
from deckhands.evaluation.datasets.file_trees import MAX_BYTES, MAX_FILES, TreeFile

DOCKER = "docker"
"""Used in place of the repositories' directory: they are in images."""
FOLDER = "/testbed"
PUBLISHED = "swebench/sweb.eval.x86_64.{}:latest"
ENTER = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi; "
    'export PYTHONPATH="$PWD:$PWD/src:$PWD/lib${PYTHONPATH:+:$PYTHONPATH}"; '
)
"""The prefix of commands in such an image: it activates the repository's environment, and puts the workspace before
`/testbed`, whose installed package refers to its own files.
"""
LIMIT_SECONDS = 300.0

_NAME = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}")


def find_image(instance_id: str, named: str) -> str:
    """Return the image of an instance: the one that its row names, or else the published one.

    Raises:
        ValueError: the engine does not have it, or there is no engine.
    """
    image = named or PUBLISHED.format(instance_id.replace("__", "_1776_").lower())
    if _NAME.fullmatch(image) is None:
        raise ValueError(f"{image[:100]!r} is not the name of an image")
    try:
        is_here = bool(_run_docker("image", "ls", "--quiet", image).strip())
    except UsageError as error:
        raise ValueError(str(error)) from error
    if not is_here:
        raise ValueError(f"the engine has no image {image}: docker pull {image}")
    return image


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The files of the repository in an image."""

    image: str

    def read(self) -> dict[str, TreeFile]:
        """Return the files.

        Raises:
            UsageError: they cannot be read, or are more than a workspace may have.
        """
        with _container(self.image) as container:
            found = _copy_files(container, ".", self.image)
        if found is None:
            raise UsageError(f"The image {self.image} has no directory {FOLDER}.")
        return found

    def read_some(self, names: Iterable[str]) -> dict[str, TreeFile]:
        """Return these files; missing ones are left out."""
        with _container(self.image) as container:
            copied = {name: _copy_files(container, name, self.image) for name in names}
        return {name: next(iter(files.values())) for name, files in copied.items() if files}


def _copy_files(container: str, name: str, image: str) -> dict[str, TreeFile] | None:
    """Return the regular files below a path, without Git history; None if the path does not exist."""
    command = [_program(), "cp", f"{container}:{FOLDER}/{name}", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as copying:  # noqa: S603  (ours)
        assert copying.stdout is not None
        try:
            return dict(_files_in(copying.stdout, image))
        except tarfile.ReadError:
            return None
        finally:
            copying.kill()


def _files_in(stream: IO[bytes], image: str) -> Iterator[tuple[str, TreeFile]]:
    size = count = 0
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or ".git" in path.parts:
                continue
            size, count = size + member.size, count + 1
            if size > MAX_BYTES or count > MAX_FILES:
                raise UsageError(f"{FOLDER} of the image {image} has more files or bytes than a workspace may have.")
            content = tar.extractfile(member)
            assert content is not None
            yield path.as_posix(), TreeFile(content.read(), bool(member.mode & 0o100))


@contextmanager
def _container(image: str) -> Iterator[str]:
    """Create a container that never starts, and remove it afterwards."""
    container = _run_docker(
        "create", "--pull", "never", "--network", "none", "--entrypoint", "none", "--", image
    ).strip()
    try:
        yield container
    finally:
        _run_docker("rm", "--force", container)


def _run_docker(*arguments: str) -> str:
    """Return the output of a `docker` command.

    Raises:
        UsageError: there is no engine, or it refuses the command; the text has the reason.
    """
    try:
        done = subprocess.run(  # noqa: S603  (arguments are ours, or a name that was checked)
            [_program(), *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"The docker engine takes longer than {LIMIT_SECONDS:.0f} seconds.") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise UsageError(f"The docker engine refuses: {why[:300]}", remedy="Start it, or pull the image.")
    return done.stdout


def _program() -> str:
    program = shutil.which("docker")
    if program is None:
        raise UsageError("There is no docker on this machine.", remedy="Install it, or name --repositories DIR.")
    return program
