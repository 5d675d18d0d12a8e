"""The egress proxy: connects a sandbox to the hosts on a list and to nothing else.

Start with: proxy. The descriptor numbers of a new proxy are here, because the code that starts one needs nothing else.
"""

from __future__ import annotations

CONTROL_FD = 3
EGRESS_LISTENER_FD = 4
