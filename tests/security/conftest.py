"""What several tests of security begin with."""

from __future__ import annotations

from tests.door_parts import producer  # noqa: F401  (a fixture)
