"""Pytest fixtures that start model servers as real processes and end them by their ids.

A test module takes them in with `pytest_plugins = ("tests.model_server.fixtures",)`.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.model_server.running_server import RunningModelServer


def _servers() -> Iterator[Callable[..., RunningModelServer]]:
    running: list[RunningModelServer] = []

    def start(*arguments: str) -> RunningModelServer:
        running.append(RunningModelServer(arguments))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def model_server() -> Iterator[Callable[..., RunningModelServer]]:
    """Start servers: `model_server("--builtin", "bash:3", "--latency", "0.1")`."""
    yield from _servers()


@pytest.fixture(scope="module")
def shared_model_server() -> Iterator[Callable[..., RunningModelServer]]:
    """Start servers that live as long as the test module; tests `clear()` them."""
    yield from _servers()
