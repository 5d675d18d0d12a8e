"""The egress proxy: connects a sandbox to the hosts on a list and to nothing else.

Start with: proxy. This module has the descriptor numbers of a new proxy, for the code that starts one.
"""

from __future__ import annotations

CONTROL_FD = 3
EGRESS_LISTENER_FD = 4
