"""Secrets that are looked up when a command uses them: a task names a source of the operator's table, never a value.

Holds: a reference names no address, command, file or credential; the tool worker's operator does, and lists the tenants
that may use each source.
"""

from __future__ import annotations

import re
from typing import Annotated, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import DeckhandsError, UsageError

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]*"
SOURCE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$"
PATH_PATTERN = rf"^({_PART}(/{_PART})*)?$"
"""Parts of a path start with a letter, a digit or `_`: none is `..`, an option of a program, or empty."""
_TEXT = re.compile(r"(?P<source>[^:#]+)(:(?P<path>[^#]*))?(#(?P<field>.*))?", re.DOTALL)


class SecretUnavailable(DeckhandsError):
    """A secret cannot be looked up; the text contains no value."""

    code = "secret_unavailable"


class SecretReference(BaseModel):
    """Where a secret's value is looked up, each time that a command uses it.

    Attributes:
        source: an entry of the operator's table of sources, `DECKHANDS_SECRET_SOURCES`.
        path: the secret within the source.
        field: the part of a structured secret; empty: the whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, Field(pattern=SOURCE_PATTERN, examples=["vault"])]
    path: Annotated[str, Field(pattern=PATH_PATTERN, max_length=500, examples=["team/api"])] = ""
    field: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,199})?$", examples=["token"])] = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `SOURCE`, `SOURCE:PATH` or `SOURCE:PATH#FIELD`.

        Raises:
            UsageError: it has another form.
        """
        found = _TEXT.fullmatch(text)
        try:
            return cls.model_validate({name: part or "" for name, part in found.groupdict().items()} if found else {})
        except ValueError:
            raise UsageError(
                f"{ascii(text)[:200]} does not name the source of a secret.",
                remedy="Write SOURCE:PATH or SOURCE:PATH#FIELD, such as vault:team/api#token.",
            ) from None

    def __str__(self) -> str:
        return self.source + (f":{self.path}" if self.path else "") + (f"#{self.field}" if self.field else "")


SecretValue = str | SecretReference
"""What a task gives as a secret: the value, or where to look it up."""


class SecretLookup(Protocol):
    """Looks up secrets: the sources of a tool worker's operator."""

    async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
        """Return the current value.

        Args:
            tenant: of the conversation that has the secret; empty if it has none.

        Raises:
            SecretUnavailable: there is no such source for this tenant, or it does not answer.
        """
        ...
