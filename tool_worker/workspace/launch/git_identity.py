"""The identity under which git commits in a workspace, unless the repository or its user sets another."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_CHARS = 200


@dataclass(frozen=True, slots=True)
class GitIdentity:
    """A name and an address; an empty one is left to git.

    Raises:
        ValueError: git could not take one of them, or would take it for more.
    """

    name: str = "deckhands"
    email: str = "deckhands@localhost"

    def __post_init__(self) -> None:
        """Refuse what is no single line of text."""
        for text in (self.name, self.email):
            if len(text) > LIMIT_CHARS or not all(character.isprintable() for character in text):
                raise ValueError(f"{text[:LIMIT_CHARS]!r} is not a line of up to {LIMIT_CHARS} characters")

    def configuration(self) -> str:
        """Return the identity as git's configuration files have it."""
        lines = [f"\t{key} = {_quoted(text)}\n" for key, text in (("name", self.name), ("email", self.email)) if text]
        return "".join(("[user]\n", *lines)) if lines else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
