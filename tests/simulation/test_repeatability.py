"""A simulated run is the same to the byte: again, in another process, with other hashes, and on a busy machine."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.runtime.ids import new_worker_id
from broker.testing.manual_clock import ManualClock
from tests.simulation.canonical import Plan, simulate
from tests.simulation.errand import sender
from tests.simulation.one_run import traced
from tests.simulation.sealed import NotSealed, sealed

ROOT = Path(__file__).parents[2]
SEEDS = (3,)
RUN_LIMIT_SECONDS = 240.0
BURN = "while True: pass"


@pytest.fixture
def _busy_machine() -> Iterator[None]:
    """Two programs that use all of two cores."""
    programs = [subprocess.Popen([sys.executable, "-I", "-S", "-c", BURN]) for _ in range(2)]
    yield
    for program in programs:
        program.kill()
        program.wait()


def printed_elsewhere(folder: Path, *, hash_seed: str) -> list[str]:
    command = [sys.executable, "-m", "tests.simulation.one_run", str(folder), *map(str, SEEDS)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=RUN_LIMIT_SECONDS
    )
    return done.stdout.splitlines()


def test_the_same_seed_gives_the_same_run_to_the_byte(tmp_path: Path) -> None:
    for seed in SEEDS:
        assert traced(tmp_path, seed) == traced(tmp_path, seed)


def test_full_conversation_repeats_from_its_first_run(tmp_path: Path) -> None:
    """Files of the first run on the node's disk made later ones different."""
    errand = sender(tmp_path)
    first, second = (simulate(Plan(is_traced=True), {}, person=errand).cluster.wire.trace for _ in range(2))
    assert first == second


def printed_here(folder: Path) -> list[str]:
    return [line for seed in SEEDS for line in (f"seed {seed}", *traced(folder, seed))]


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_hashes_do_not_change_a_run(hash_seed: str, tmp_path: Path) -> None:
    assert printed_elsewhere(tmp_path, hash_seed=hash_seed) == printed_here(tmp_path)


@pytest.mark.soak
@pytest.mark.usefixtures("_busy_machine")
def test_a_busy_machine_does_not_change_a_run(tmp_path: Path) -> None:
    assert printed_elsewhere(tmp_path, hash_seed="1") == printed_here(tmp_path)


def test_simulation_draws_from_its_seed_and_own_clock() -> None:
    def drawn(seed: int) -> tuple[object, ...]:
        clock = ManualClock()
        clock.advance(12.5)
        with sealed(seed, clock):
            return new_worker_id("tool"), os.urandom(8), time.monotonic(), time.time()

    assert drawn(1) == drawn(1)
    assert drawn(1)[:2] != drawn(2)[:2]
    assert drawn(1)[2:] == (12.5, ManualClock().now().timestamp() + 12.5)


def test_a_simulation_that_reaches_for_the_machine_fails() -> None:
    with sealed(0, ManualClock()):
        with pytest.raises(NotSealed):
            threading.Thread(target=print).start()
        with pytest.raises(NotSealed):
            time.sleep(0)
        with pytest.raises(NotSealed):
            subprocess.run(["true"], check=True)
