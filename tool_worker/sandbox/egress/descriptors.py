"""The descriptor numbers of a new proxy. A separate file, because the code that starts a proxy needs nothing else."""

from __future__ import annotations

CONTROL_FD = 3
EGRESS_LISTENER_FD = 4
