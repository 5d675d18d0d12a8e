"""The identity under which git commits in a workspace, unless the repository or its user sets another."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_CHARS = 200


@dataclass(frozen=True, slots=True)
class GitIdentity:
    """A name and an email address; git chooses an empty one itself.

    Raises:
        ValueError: One of them has a character that git rejects or interprets.
    """

    name: str = "deckhands"
    email: str = "deckhands@localhost"

    def __post_init__(self) -> None:
        """Check that both are single lines of text."""
        for text in (self.name, self.email):
            if len(text) > LIMIT_CHARS or not all(character.isprintable() for character in text):
                raise ValueError(f"{text[:LIMIT_CHARS]!r} is not a line of up to {LIMIT_CHARS} characters")

    def configuration(self) -> str:
        """Return the identity in the format of git's configuration files."""
        lines = [f"\t{key} = {_quoted(text)}\n" for key, text in (("name", self.name), ("email", self.email)) if text]
        return "".join(("[user]\n", *lines)) if lines else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
