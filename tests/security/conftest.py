"""Shared fixtures of security tests."""

from __future__ import annotations

from tests.faults.conftest import cluster  # noqa: F401  (a fixture)
from tests.ingress_parts import producer  # noqa: F401  (a fixture)
