"""Runs an example of OpenHands' SDK with a running server of ours: `python -m tests.openhands_examples FILE`.

It is run by the Python of the SDK. The examples start a server themselves; here the class that does so gives them the
address of ours. They send no key, so this adds ours to what their clients send. The examples stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

from tests.openhands_own_tests import pytest_configure as send_our_key


@contextlib.contextmanager
def our_server(*_args: Any, **_options: Any) -> Iterator[Any]:
    """Give an example the server, in place of one that it would start."""
    url = os.environ["OPENHANDS_TEST_URL"]
    yield types.SimpleNamespace(base_url=url, session_api_key=os.environ["OPENHANDS_TEST_KEY"])


def main() -> None:
    """Run the example that the command line names."""
    send_our_key()
    helpers = types.ModuleType("scripts.utils")
    helpers.ManagedAPIServer = our_server  # type: ignore[attr-defined]
    sys.modules["scripts"] = types.ModuleType("scripts")
    sys.modules["scripts.utils"] = helpers
    runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
