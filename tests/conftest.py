"""Settings of all tests: Hypothesis, garbage collection, and the stores.

Holds: no test leaves a program running that has a file of the tests open, or an overlay mounted.
"""

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from celery._state import _set_task_join_will_block
from hypothesis import settings
from pytest_timeout import Settings
from pytest_timeout import pytest_timeout_set_timer as set_timer

from tests.exploring import PUSH
from tests.last_runs import LastRuns
from tests.polling import unhurried
from tests.proof import LIMIT, OPTION, Proof
from tests.stores import (  # noqa: F401  (fixtures)
    clock,
    connect,
    lossy_wire,
    memory_store,
    redis_server,
    store,
    valkey_server,
    valkey_store,
)
from tool_worker.workspace.files.overlay_mounts import unmount_below

settings.load_profile(PUSH)  # `make soak` loads the other one, by --hypothesis-profile

ENDING_SECONDS = 30.0
MOST_PATIENCE = 5.0
"""How many times its limit a test may take on a busy machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-runs", action="store_true", help="write to tests/LAST_RUNS.md which marked tests ran")
    parser.addoption(OPTION, type=Path, help="the folder for what tests measure; `make proof` gives it")
    parser.addoption(LIMIT, type=float, default=math.inf, help="how long the trials of a test for `make proof` last")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_runs and not hasattr(config, "workerinput"):  # one process writes
        config.pluginmanager.register(LastRuns())


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """Give a test on a busy machine longer, so that the limits of its waits end first: they name what did not come."""
    longer = min(unhurried(settings.timeout), MOST_PATIENCE * settings.timeout)
    return bool(set_timer(item, settings._replace(timeout=longer)))


gc.disable()  # while modules are imported, which leaves no garbage


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look again at modules and tests: there are millions of their objects.

    Older objects are left alone too: otherwise a later test would be blamed for an object that an earlier one left
    open.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000_000)
    gc.enable()


@pytest.fixture(scope="session")
def soak_seed(request: pytest.FixtureRequest) -> int:
    """The start seed of this run of `make soak`; 0 without it."""
    return int(request.config.getoption("--hypothesis-seed") or 0)


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Takes what this test measured, for docs/proof.md; see tests/proof.py."""
    return Proof(request.config.getoption(OPTION), request.node.nodeid, request.config.getoption(LIMIT))


@pytest.fixture(autouse=True)
def _results_may_be_waited_for() -> None:
    """Undo the process-wide setting of an ingress's application that no result may be awaited."""
    _set_task_join_will_block(False)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    unmount_below(tmp_path_factory.getbasetemp())  # the workspaces of forks
    users = {program: describe(program) for program in users_of(tmp_path_factory.getbasetemp())}
    _, left = psutil.wait_procs([*users], timeout=unhurried(ENDING_SECONDS))
    assert not left, "tests left programs running:\n" + "\n".join(users[program] for program in left)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    unmount_below(tmp_path_factory.getbasetemp())


def users_of(folder: Path) -> Iterator[psutil.Process]:
    """The other programs that work below this folder or have one of its files open."""
    for program in psutil.process_iter(["cmdline"]):
        links = [Path(f"/proc/{program.pid}/cwd"), *files_of(program.pid)]
        if program != psutil.Process() and any(folder in target_of(link).parents for link in links):
            yield program


def describe(program: psutil.Process) -> str:
    """Return the command of a program, which may have ended."""
    return f"{program.pid} {' '.join(program.info['cmdline'] or [])}"


def files_of(pid: int) -> list[Path]:
    """Return the links to a program's open files; none if it has ended or belongs to another user."""
    try:
        return [*Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def target_of(link: Path) -> Path:
    """Return the target of a link; nothing if it does not exist or belongs to another user."""
    try:
        return link.readlink()
    except OSError:
        return Path()
