"""Fixtures of tests with a real store."""

from __future__ import annotations

from tests.conversation_hands import hands  # noqa: F401  (a fixture)
