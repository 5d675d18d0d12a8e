"""Pytest fixtures that start model servers as real processes and end them by their ids.

A test module takes them in with `pytest_plugins = ("tests.model_server.fixtures",)`.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.model_server.running_server import RunningModelServer


@pytest.fixture
def model_server() -> Iterator[Callable[..., RunningModelServer]]:
    """Start servers: `model_server("--builtin", "bash:3", "--latency", "0.1")`."""
    with_servers = _Servers()
    yield with_servers.start
    with_servers.stop()


@pytest.fixture(scope="module")
def shared_model_server() -> Iterator[Callable[..., RunningModelServer]]:
    """Start servers that live as long as the test module; tests `clear()` them."""
    with_servers = _Servers()
    yield with_servers.start
    with_servers.stop()


class _Servers:
    def __init__(self) -> None:
        self._running: list[RunningModelServer] = []

    def start(self, *arguments: str) -> RunningModelServer:
        self._running.append(RunningModelServer(arguments))
        return self._running[-1]

    def stop(self) -> None:
        for server in self._running:
            server.stop()
