"""Maps kinds of actions to their tools."""

from __future__ import annotations

import tool_worker.tools
from broker.runtime import import_modules
from tool_worker.tools.tool import Tool


def find_tool(kind: str) -> Tool | None:
    """Return the tool for a kind of action; None if this worker has none."""
    return Tool.OF_KIND.get(kind)


import_modules(tool_worker.tools)  # loading a module registers its tools
