"""Runs an example of OpenHands' SDK unchanged, by the SDK's Python; the server that it would start is one of ours.

python openhands_example.py EXAMPLE.py
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from typing import Any, Self

from openhands_own_tests import pytest_configure


class RunningServer:
    """What an example uses of a server that it starts."""

    base_url = os.environ["OPENHANDS_TEST_URL"]

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Take the options of the server that is not started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the server alone."""


if __name__ == "__main__":
    pytest_configure()
    sys.modules["scripts"] = types.ModuleType("scripts")
    sys.modules["scripts.utils"] = types.ModuleType("scripts.utils")
    sys.modules["scripts.utils"].ManagedAPIServer = RunningServer  # type: ignore[attr-defined]
    runpy.run_path(sys.argv[1], run_name="__main__")
