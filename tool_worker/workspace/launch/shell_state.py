"""The state of a conversation's shell that its forks start with.

It comes from the shell itself, so it is as untrusted as any other file of the workspace: it is only ever given to a
shell in a sandbox.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Self

SCRIPT_LIMIT_CHARS = 256 * 2**10
PATH_LIMIT_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ShellState:
    """The state of an idle shell.

    Attributes:
        script: Bash commands that restore the exported variables, the functions, the aliases and the umask.
        directory: The shell's directory, as its programs see it.
        workspace: The path of the workspace, as its programs see it.
        newest: The highest action id that had started; 0 for none. No action was in progress.
        event: The event of the checkpoint; 0 if not known.
    """

    script: str
    directory: str
    workspace: str
    newest: int
    event: int = 0

    @classmethod
    def parse(cls, fields: object) -> Self | None:
        """Return the state in a JSON object; None if it is none, or not a valid one."""
        match fields:
            case {
                "script": str(script),
                "directory": str(directory),
                "workspace": str(workspace),
                "newest": int(newest),
                **others,
            }:
                has_paths = all(path[:1] == "/" and len(path) <= PATH_LIMIT_CHARS for path in (directory, workspace))
                if has_paths and len(script) <= SCRIPT_LIMIT_CHARS and "\0" not in script + directory + workspace:
                    event = others.get("event")
                    return cls(script, directory, workspace, newest, event if isinstance(event, int) else 0)
        return None

    def move_to(self, workspace: str) -> Self:
        """Return the state for a workspace at another path. Every mention of the old path is replaced."""
        old = self.workspace
        if old == workspace:
            return self
        is_inside = self.directory == old or self.directory.startswith(f"{old}/")
        directory = workspace + self.directory[len(old) :] if is_inside else workspace
        return replace(self, script=self.script.replace(old, workspace), directory=directory, workspace=workspace)

    def to_fields(self) -> dict[str, str | int]:
        """Return the object that `parse` reads."""
        return asdict(self)
