"""The numbers of the descriptors that a proxy begins with; a separate file, because starting one needs no more."""

from __future__ import annotations

CONTROL_FD = 3
EGRESS_LISTENER_FD = 4
