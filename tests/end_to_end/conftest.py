"""Tests of whole programs, from their start to their end: the command, the pages, the examples, the packages.

Each starts interpreters, workers or a browser, so together they take as long as all others: `make test` leaves
them to `make end-to-end`.
"""

from __future__ import annotations

from tests.integration.conftest import hands, producer, programs, run, workspaces  # noqa: F401  (fixtures)
