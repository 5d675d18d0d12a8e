"""Repositories at a commit, from mirrors or archives in a directory of this machine.

    DIR/OWNER__NAME.git   DIR/OWNER/NAME.git   DIR/NAME.git     a mirror, or a clone; with or without `.git`
    DIR/INSTANCE.tar.gz   DIR/INSTANCE.tar     DIR/INSTANCE.zip  the files of one instance

Holds: nothing is fetched, and no hook or filter of a repository runs. Git history is not copied into a workspace,
because an agent could find the fix of a bug in it.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from broker.runtime import UsageError
from deckhands.evaluation.datasets.docker_images import ImageFiles
from deckhands.evaluation.datasets.file_trees import MAX_BYTES, MAX_FILES, FileSource, TreeFile, read_tree

ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
LIMIT_SECONDS = 300.0
ENCRYPTED = 1
UNPACKED_IN_PARTS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The methods of ZIP files whose content can be unpacked up to a limit."""


def find_instance_files(directory: Path, instance_id: str, repository: str, commit: str) -> FileSource:
    """Return the source of an instance's files.

    Raises:
        ValueError: they are not in the directory.
    """
    for ending in ARCHIVES:
        if (archive := directory / f"{instance_id}{ending}").is_file():
            return ArchiveFiles(archive)
    owner, _, name = repository.partition("/")
    for place in (f"{owner}__{name}", f"{owner}/{name}", name):
        for mirror in (directory / f"{place}.git", directory / place):
            if not mirror.is_dir():
                continue
            if run_git(mirror, "cat-file", "-e", f"{commit}^{{commit}}") is None:
                raise ValueError(f"the mirror {mirror} has no commit {commit[:40]}")
            return CommitFiles(mirror, commit)
    raise ValueError(f"{directory} has neither a mirror of {repository} nor an archive {instance_id}.tar.gz")


@dataclass(frozen=True, slots=True)
class CommitFiles:
    """The files of a commit, or some of them."""

    mirror: Path
    commit: str
    only: tuple[str, ...] = ()

    def read(self) -> dict[str, TreeFile]:
        """Return the files.

        Raises:
            UsageError: Git cannot read them.
        """
        packed = run_git(self.mirror, "archive", "--format=tar", self.commit, "--", *self.only)
        if packed is None:
            raise UsageError(f"Git cannot read {self.commit} of {self.mirror}.", remedy="Fetch it into the mirror.")
        return _in_tar(packed, str(self.mirror))

    def read_some(self, names: Iterable[str]) -> dict[str, TreeFile]:
        """Return these files; missing ones are left out."""
        listed = run_git(self.mirror, "ls-tree", "-r", "-z", "--name-only", self.commit, "--", *names) or b""
        there = tuple(sorted(name for name in listed.decode(errors="replace").split("\0") if name))
        return CommitFiles(self.mirror, self.commit, there).read() if there else {}


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The files of an archive; a single directory at its top is not part of their paths."""

    path: Path

    def read(self) -> dict[str, TreeFile]:
        """Return the files.

        Raises:
            UsageError: the archive cannot be read.
        """
        try:
            is_zip = self.path.name.endswith(".zip")
            found = _in_zip(self.path) if is_zip else _in_tar(self.path.read_bytes(), str(self.path))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(f"The archive {self.path} cannot be read: {error}.") from error
        tops = {name.partition("/")[0] for name in found}
        if len(tops) == 1 and all("/" in name for name in found):
            return {name.partition("/")[2]: file for name, file in found.items()}
        return found

    def read_some(self, names: Iterable[str]) -> dict[str, TreeFile]:
        """Return these files; missing ones are left out."""
        found = self.read()
        return {name: found[name] for name in names if name in found}


@dataclass(frozen=True, slots=True)
class PatchedFiles:
    """The files that a patch touches, in their patched form, and further ones."""

    before: CommitFiles | ArchiveFiles | ImageFiles
    patch: str
    names: tuple[str, ...]
    further: tuple[tuple[str, TreeFile], ...] = ()

    def read(self) -> dict[str, TreeFile]:
        """Return the files.

        Raises:
            UsageError: the patch does not apply.
        """
        with tempfile.TemporaryDirectory(prefix="deckhands-patched-") as folder:
            for name, file in self.before.read_some(self.names).items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.content)
                path.chmod(0o755 if file.is_executable else 0o644)
            patch = self.patch.encode()
            if patch.strip() and run_git(Path(folder), "apply", "--whitespace=nowarn", "-", given=patch) is None:
                raise UsageError("The patch does not apply.")
            return read_tree(Path(folder)) | dict(self.further)


def run_git(directory: Path, *arguments: str, given: bytes = b"") -> bytes | None:
    """Return the output of a Git command in a directory; None if it failed.

    Raises:
        UsageError: Git is not installed, or takes too long.
    """
    environment = {
        "PATH": os.defpath,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(directory.parent),
        "GIT_NO_LAZY_FETCH": "1",
    }
    program = shutil.which("git")
    if program is None:
        raise UsageError("Git is not installed.", remedy="Install it as `git`.")
    command = [program, "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    try:
        done = subprocess.run(  # noqa: S603  (the arguments are ours or names in a dataset, behind --)
            [*command, *arguments],
            cwd=directory,
            env=environment,
            input=given,
            capture_output=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"Git takes longer than {LIMIT_SECONDS:.0f} seconds in {directory}.") from error
    return done.stdout if done.returncode == 0 else None


def is_safe(name: str) -> bool:
    """Return whether a relative path stays below its directory."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _in_tar(packed: bytes, place: str) -> dict[str, TreeFile]:
    found: dict[str, TreeFile] = {}
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                size += member.size
                _check(place, member.name, size, len(found))
                content = tar.extractfile(member)
                assert content is not None
                name = PurePosixPath(member.name).as_posix()
                found[name] = TreeFile(content.read(), bool(member.mode & 0o100))
    except tarfile.TarError as error:
        raise UsageError(f"{place} cannot be read as an archive: {error}.") from error
    return found


def _in_zip(path: Path) -> dict[str, TreeFile]:
    found: dict[str, TreeFile] = {}
    size = 0
    with zipfile.ZipFile(path) as packed:
        for member in packed.infolist():
            mode = member.external_attr >> 16
            if member.is_dir() or mode & 0o170000 not in (0, 0o100000):
                continue
            size += member.file_size
            _check(str(path), member.filename, size, len(found))
            if member.flag_bits & ENCRYPTED or member.compress_type not in UNPACKED_IN_PARTS:
                raise ValueError(f"{ascii(member.filename)[:200]} is encrypted, or packed otherwise than by deflate")
            with packed.open(member) as opened:
                content = opened.read(
                    member.file_size
                )  # without the size, up to 2 GiB are unpacked before it is checked
            found[PurePosixPath(member.filename).as_posix()] = TreeFile(content, bool(mode & 0o100))
    return found


def _check(place: str, name: str, size: int, count: int) -> None:
    if not is_safe(name):
        raise UsageError(f"{place} has a file outside: {ascii(name)[:200]}.")
    if size > MAX_BYTES or count >= MAX_FILES:
        raise UsageError(f"{place} has more than {MAX_BYTES:,} bytes or {MAX_FILES:,} files.")


def find_touched_files(patch: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the files that a patch creates or changes, and those that it deletes."""
    left: dict[str, None] = {}
    deleted: dict[str, None] = {}
    old = ""
    for line in patch.splitlines():
        if line.startswith(("--- a/", "rename from ")):
            old = line.partition("a/")[2] if line.startswith("---") else line.removeprefix("rename from ")
            deleted[old.partition("\t")[0]] = None
        elif line.startswith(("+++ b/", "rename to ")):
            new = line.partition("b/")[2] if line.startswith("+++") else line.removeprefix("rename to ")
            left[new.partition("\t")[0]] = None
    return list(left), [name for name in deleted if name not in left]
