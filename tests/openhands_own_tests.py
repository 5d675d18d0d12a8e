"""A plug-in of pytest for the tests of OpenHands' SDK: their server is a running server of ours.

It is loaded by the Python of the SDK. The tests start a server inside their own process; here the function that does
so gives them the address of ours. They send no key, so this adds ours to what their clients send.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@contextlib.contextmanager
def our_server(*_args: Any, **_options: Any) -> Iterator[dict[str, Any]]:
    """Give a test the server, in place of one that it would start."""
    yield {
        "host": os.environ["OPENHANDS_TEST_URL"],
        "api_key": os.environ["OPENHANDS_TEST_KEY"],
        "workspace_path": Path(os.environ["OPENHANDS_TEST_FOLDER"]),
    }


def our_agent_server() -> Iterator[dict[str, Any]]:
    """Stand in for the fixture that starts a server in another process."""
    port = urlsplit(os.environ["OPENHANDS_TEST_URL"]).port
    yield {"port": port, "api_key": os.environ["OPENHANDS_TEST_KEY"]}


def pytest_configure() -> None:
    """Send our key, and stand in for the package that starts containers, of which the tests use one function."""
    import httpx
    from openhands.sdk.workspace import RemoteWorkspace

    key = os.environ["OPENHANDS_TEST_KEY"]
    for name in ("openhands.workspace", "openhands.workspace.docker", "openhands.workspace.docker.workspace"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["openhands.workspace.docker.workspace"].find_available_tcp_port = int  # type: ignore[attr-defined]
    started, connect = RemoteWorkspace.model_post_init, httpx.Client.__init__

    def start(self: Any, context: Any) -> None:
        self.api_key = key
        started(self, context)

    def connect_with_key(self: Any, *args: Any, **options: Any) -> None:
        connect(self, *args, **options)
        self.headers.setdefault("X-Session-API-Key", key)

    RemoteWorkspace.model_post_init = start
    httpx.Client.__init__ = connect_with_key  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Replace the function that starts a server, in each module of tests."""
    for item in items:
        item.module.live_server_env = our_server
        for fixture in item._fixtureinfo.name2fixturedefs.get("agent_server", ()):
            fixture.func = our_agent_server
