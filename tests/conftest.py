"""What every test shares: how Hypothesis runs, when garbage is collected, and the stores.

Holds: no test leaves a program running that has a file of the tests open.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from celery._state import _set_task_join_will_block
from hypothesis import settings

from tests.exploring import PUSH
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

settings.load_profile(PUSH)  # `make soak` loads the other one, by --hypothesis-profile

ENDING_SECONDS = 5.0


gc.disable()  # while modules are imported, which leaves no garbage


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look again at modules and tests: there are millions of their objects.

    What has lived long is left alone too: what a test has forgotten to close would be blamed on a later one.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000_000)
    gc.enable()


@pytest.fixture(scope="session")
def soak_seed(request: pytest.FixtureRequest) -> int:
    """Where this run of `make soak` begins to look; 0 without it."""
    return int(request.config.getoption("--hypothesis-seed") or 0)


@pytest.fixture(autouse=True)
def _results_may_be_waited_for() -> None:
    """Take back what making an ingress's application says of the whole process: that nobody in it waits for results."""
    _set_task_join_will_block(False)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    _, left = psutil.wait_procs([*users_of(tmp_path_factory.getbasetemp())], timeout=ENDING_SECONDS)
    assert not left, "tests left programs running:\n" + "\n".join(map(str, left))


def users_of(folder: Path) -> Iterator[psutil.Process]:
    """The other programs that work below this folder or have one of its files open."""
    for program in psutil.process_iter(["cmdline"]):
        links = [Path(f"/proc/{program.pid}/cwd"), *Path("/proc").glob(f"{program.pid}/fd/*")]
        if program != psutil.Process() and any(folder in target_of(link).parents for link in links):
            yield program


def target_of(link: Path) -> Path:
    """What a link leads to; nothing when it is gone or somebody else's."""
    try:
        return link.readlink()
    except OSError:
        return Path()
