"""Shared fixtures of security tests."""

from __future__ import annotations

from tests.ingress_parts import producer  # noqa: F401  (a fixture)
