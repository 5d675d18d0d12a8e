"""The script every benchmark follows: so many turns with one command each, then the end.

Commands differ from turn to turn, so that nobody takes the conversation for one that is stuck.
"""

from __future__ import annotations

import json
from pathlib import Path


def write_script(path: Path, calls: int, *, command: str = "true {}") -> Path:
    """Write a script of `calls` turns with a command and one that finishes, and return its path.

    Args:
        path: of the file, in the format of docs/models.md#scripted-models.
        command: `{}` is the number of the turn, from 0.
    """
    turns = [
        {
            "text": f"Step {number}.",
            "tool_calls": [{"name": "execute_bash", "arguments": {"command": command.format(number)}}],
            "usage": {"prompt_tokens": 1_000 + 100 * number, "completion_tokens": 50},
        }
        for number in range(calls)
    ]
    turns.append({"tool_calls": [{"name": "finish", "arguments": {"message": "Done."}}]})
    path.write_text(json.dumps({"description": f"{calls} commands, then the end.", "turns": turns}))
    return path
