"""Which tool carries out which kind of action."""

from __future__ import annotations

import tool_worker.tools
from broker.runtime import import_modules
from tool_worker.tools.tool import Tool


def tool_for(kind: str) -> Tool | None:
    """Return what carries out a kind of action; None: this worker has nothing for it."""
    return Tool.OF_KIND.get(kind)


import_modules(tool_worker.tools)  # every tool is registered once its module is loaded
