"""The directory of embedded clusters and runs: DECKHANDS_HOME, or else `~/.deckhands`.

    cluster/            files of `deckhands up`: its store, logs, workspaces; `url` while it runs
    evaluations/<name>/ the private cluster of one evaluation
    runs/<id>/          one run: its store and logs, and its results: events.jsonl, summary.json
    notes/<user>/       notes by the agents of runs, one file per project
    server.key          the API key that `deckhands serve` and `up --web` created for this machine
    metrics.token       the token that `deckhands metrics` created
    errors.log          tracebacks of unexpected errors

An example project is a small program with a failing test, and a model script that fixes it. The projects are in the
folder `examples/`, which is also part of the installed package; a user gets a copy.

Holds: only its user can access it. A directory has one supervisor at a time, known by its pid.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from broker.runtime import DeckhandsError, StoreUnavailable, UsageError


class Home:
    """The home directory of embedded clusters and runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cluster = path / "cluster"
        self.runs = path / "runs"
        self.notes = path / "notes"
        self.server_key = path / "server.key"
        self.metrics_token = path / "metrics.token"
        self.cluster_url_file = self.cluster / "url"
        self.celery_url_file = self.cluster / "celery-url"

    def run_folder(self, conversation_id: str) -> Path:
        """Return the folder of a conversation's run, which may not exist."""
        return self.runs / conversation_id

    def evaluation_folder(self, name: str) -> Path:
        """Return the folder of an evaluation's private cluster, which may not exist."""
        return self.path / "evaluations" / name

    def evaluation_url(self, name: str) -> str:
        """Return the URL of an evaluation's private store, even if it is not running."""
        return _find_url(self.evaluation_folder(name))

    def has_run(self, conversation_id: str) -> bool:
        """Return whether a conversation has a run here.

        Raises:
            UsageError: The home directory cannot be read.
        """
        try:
            return self.run_folder(conversation_id).is_dir()
        except OSError as error:
            raise self._make_unusable_error(self.path, error) from error

    def run_folders(self) -> list[Path]:
        """Return the folders of all runs, newest first.

        Raises:
            UsageError: The home directory cannot be read.
        """
        try:
            return sorted(self.runs.iterdir(), key=lambda path: path.name, reverse=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._make_unusable_error(self.path, error) from error

    def prepare(self, folder: Path) -> None:
        """Create a folder in it.

        Raises:
            UsageError: The folder cannot be written.
            StoreUnavailable: The disk is full.
        """
        try:
            with _report_full_disk(folder):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._make_unusable_error(folder, error) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise self._make_unusable_error(folder, PermissionError(errno.EACCES, "it cannot be written"))

    @property
    def cluster_url(self) -> str | None:
        """URL of the cluster that `deckhands up` runs here; None if none is running.

        Raises:
            UsageError: The home directory cannot be read.
        """
        try:
            return self.cluster_url_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._make_unusable_error(self.path, error) from error

    @contextmanager
    def announce(self, url: str, celery_url: str) -> Iterator[None]:
        """Publish the URLs of the cluster and of its Celery broker to this user's programs while the block runs."""
        files = {self.celery_url_file: celery_url, self.cluster_url_file: url}
        for path, content in files.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(content + "\n")
        try:
            yield
        finally:
            for path in files:
                path.unlink(missing_ok=True)

    @property
    def has_had_cluster(self) -> bool:
        """Whether `deckhands up` has ever run a cluster here."""
        return (self.cluster / "valkey").is_dir()

    def run_url(self, conversation_id: str) -> str:
        """Return the URL of a run's private store, even if it is not running."""
        return _find_url(self.run_folder(conversation_id))

    @staticmethod
    def _make_unusable_error(folder: Path, error: OSError) -> UsageError:
        return UsageError(
            f"The directory {folder} cannot be used: {error.strerror}.",
            remedy="Make it writable, or set DECKHANDS_HOME to another directory.",
        )


def make_disk_full_error(folder: Path) -> StoreUnavailable:
    """Return the error for a folder on a full disk."""
    return StoreUnavailable(
        f"The disk is full: nothing can be written in {folder}.",
        remedy="Free some space there, or set DECKHANDS_HOME to another directory.",
    )


class AlreadySupervised(UsageError):
    """Another process supervises the folder."""


@contextmanager
def supervise(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder's supervisor lock while the block runs. The kernel releases it if this process dies.

    Raises:
        Supervised: Another process holds it; the text has its pid.
        StoreUnavailable: The disk is full.
    """
    with _report_full_disk(folder):
        lock = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(lock, 16, 0).decode().strip()
            raise AlreadySupervised(
                f"{what} is already running in {folder} (pid {pid}).",
                remedy=f"Stop it with `kill {pid}`, or set DECKHANDS_HOME to another directory.",
            ) from error
        with _report_full_disk(folder):
            os.pwrite(lock, f"{os.getpid()}\n".encode().ljust(16), 0)
        yield
    finally:
        os.close(lock)


@contextmanager
def _report_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise make_disk_full_error(folder) from error
        raise


FOLDER = Path(__file__).resolve().parents[1] / "examples"
TASK = "A test of this project fails. Find out why, fix the program, and make sure that all tests pass."


@dataclass(frozen=True, slots=True)
class Example:
    """One example project and the script of its model."""

    name: str
    project: Path
    script: Path

    @property
    def model(self) -> str:
        """Name of the scripted model."""
        return f"scripted/{self.script}"

    @property
    def turns(self) -> int:
        """Number of replies in the script."""
        return len(json.loads(self.script.read_text(encoding="utf-8"))["turns"])

    def copy_to(self, directory: Path) -> Path:
        """Copy the project into a new directory and return it."""
        shutil.copytree(self.project, directory, ignore=shutil.ignore_patterns("__pycache__"))
        return directory


def load_examples() -> list[Example]:
    """Return the examples by name.

    Raises:
        DeckhandsError: The examples are missing.
    """
    scripts = sorted((FOLDER / "scripts").glob("*.json"))
    found = [Example(script.stem, FOLDER / "projects" / script.stem, script) for script in scripts]
    found = [example for example in found if example.project.is_dir()]
    if not found:
        raise DeckhandsError(f"There are no examples in {FOLDER}.", remedy="Install Deckhands again.")
    return found


def _find_url(folder: Path) -> str:
    """Return the URL of the private store in a folder."""
    from broker.store import EmbeddedValkey  # imports all that starts a server

    return EmbeddedValkey(folder / "valkey").url
