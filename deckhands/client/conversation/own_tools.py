"""A program's own tools, for the workers of its private cluster.

Holds: a worker imports the module that defines the tool; only its name is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.runtime import UsageError
from broker.tools import CustomTool

TOOLS, PYTHON_PATH = "DECKHANDS_TOOLS", "PYTHONPATH"


def to_tool_keys(tools: Sequence[str | CustomTool]) -> tuple[str, ...]:
    """Return the keys under which tools are offered.

    Raises:
        UsageError: one is neither a key nor a tool.
    """
    if isinstance(tools, str | CustomTool):
        raise UsageError("The argument tools is one tool.", remedy="Pass a list: tools=[…].")
    for tool in tools:
        if not isinstance(tool, str | CustomTool):
            raise UsageError(
                f"{ascii(tool)[:100]} is not a tool.",
                remedy="Pass its key, or a tool that `custom_tool` returned.",
            )
    return tuple(tool if isinstance(tool, str) else tool.offer.key for tool in tools)


def build_environment(tools: Sequence[str | CustomTool], environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make tool workers offer a program's own tools.

    Args:
        environment: the variables that are set already.

    Raises:
        UsageError: a tool has no name in a module that can be imported.
    """
    own = [tool for tool in tools if isinstance(tool, CustomTool)]
    if not own:
        return {}
    named = [_name_with_folder(tool) for tool in own]
    offered = [name for name in (environment.get(TOOLS, ""), *(name for name, _ in named)) if name]
    paths = [Path(path) for path in environment.get(PYTHON_PATH, "").split(os.pathsep) if path]
    found = dict.fromkeys([*(folder for _, folder in named if folder is not None), *paths])
    return {TOOLS: ",".join(dict.fromkeys(offered)), PYTHON_PATH: os.pathsep.join(map(str, found))}


def _name_with_folder(tool: CustomTool) -> tuple[str, Path | None]:
    """Return a tool as `module:name`, and the folder that contains the module."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is not tool:
                continue
            file = getattr(module, "__file__", None)
            folder = Path(file).resolve().parent if file else None
            if module_name != "__main__":
                top = folder
                for _ in range(module_name.count(".")):
                    top = top.parent if top is not None else None
                return f"{module_name}:{name}", top
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.name:
                return f"{spec.name}:{name}", None
            if file:
                return f"{Path(file).stem}:{name}", folder
    raise UsageError(
        f"The tool {tool.offer.key} has no name in a module.",
        remedy="Define it at the top of a module, so that a worker can import it.",
    )
