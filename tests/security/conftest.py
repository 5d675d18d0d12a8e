"""What several tests of security begin with."""

from __future__ import annotations

from tests.ingress_parts import producer  # noqa: F401  (a fixture)
