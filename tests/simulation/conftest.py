"""Shared settings of the simulated tests.

Holds: how long a simulation may take is bounded in virtual time and in callbacks; the limit in real time only ends a
run that does not come to an end, on however busy a machine.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.simulation.canonical import environment

REAL_LIMIT_SECONDS = 3_600
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(REAL_LIMIT_SECONDS))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Workers that are presumed dead log it, hundreds of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the secrets is made in the home."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return environment(tmp_path_factory.mktemp("model"))
