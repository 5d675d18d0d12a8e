"""Commands whose effects can be counted: the agent of `deckhands chaos` runs them, and its check reads them.

Each appends `start N` and later `end N` to a file of the workspace. The file is evidence beside the log: the commands
themselves write it, and nothing of Deckhands reads it before the check.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

EFFECTS_FILE = "effects"
COMMAND_SECONDS = 0.3
"""How long a command takes, so that faults hit some of them in the middle."""
_COMMAND = re.compile(rf"echo start (\d+) >> {EFFECTS_FILE} && ")


def make_counted_command(number: int) -> str:
    """Return the command with this number."""
    file = EFFECTS_FILE  # may be on a full disk: then the command fails, and says so
    return f"echo start {number} >> {file} && sleep {COMMAND_SECONDS} && echo end {number} >> {file}"


def parse_counted_command(command: str) -> int | None:
    """Return the number of such a command; None for any other command."""
    found = _COMMAND.match(command)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class CountedEffects:
    """The effects of the commands of one workspace: how often each numbered command started, and how often it ended."""

    starts: Counter[int]
    ends: Counter[int]

    @classmethod
    def parse(cls, text: str) -> CountedEffects:
        """Count the lines of the file; other lines are ignored."""
        found = {"start": Counter[int](), "end": Counter[int]()}
        for line in text.splitlines():
            word, _, number = line.partition(" ")
            if word in found and number.isdigit():
                found[word][int(number)] += 1
        return cls(found["start"], found["end"])
