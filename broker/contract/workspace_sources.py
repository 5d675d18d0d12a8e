"""The initial content of a workspace that is not an existing directory: a Git repository or an uploaded file.

Holds: no address contains a password, because addresses are in the log. No part of an address can be parsed as an
option by git.
Does not: fetch anything; a tool worker does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from broker.runtime import UsageError

SCHEMES = ("https", "http", "file")
PREFIX = "git+"
Format = Literal["tar", "zip", "bundle"]
FORMATS: dict[str, Format] = {
    ".bundle": "bundle",
    ".zip": "zip",
    ".tar": "tar",
    ".tar.gz": "tar",
    ".tgz": "tar",
    ".tar.bz2": "tar",
    ".tbz2": "tar",
    ".tar.xz": "tar",
    ".txz": "tar",
}
"""File formats by the suffix of the file's name."""

_ADDRESS_WITHOUT_PREFIX = re.compile(r"(ssh|git|https?)://|[\w.-]+@[\w.-]+:")
_REMEDY = (
    "Write git+https://HOST/PATH#BRANCH, or git+http:// or git+file://. Nothing is cloned over ssh: use https with a "
    "token (--clone-secret), or clone it yourself and name the directory or a `git bundle`."
)

_URL = r"^(https?://([^\s/:@]+@)?([^\s/:@]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?|file://)/\S*$"
"""A pattern for readers of the schema; it accepts all valid addresses and few others."""
_REF = r"^([A-Za-z0-9._/@+][A-Za-z0-9._/@+-]{0,199})?$"


def _needs_kind(schema: dict[str, Any]) -> None:
    """Make `kind` required in the JSON Schema, because it discriminates the sources."""
    schema["required"] = ["kind", *schema["required"]]


class GitSource(BaseModel):
    """A repository to clone.

    Attributes:
        url: `https://`, `http://` or `file://` (a repository on the tool worker's own host).
        ref: a branch, a tag or the 40 digits of a commit; empty for the repository's default.
        depth: the number of commits of the history; None for all.
        secret: the name of the conversation's secret that holds the password or token; empty for none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_needs_kind)

    kind: Literal["git"] = "git"
    url: Annotated[str, Field(max_length=2_000, json_schema_extra={"pattern": _URL})]
    ref: Annotated[str, Field(pattern=_REF)] = ""
    depth: Annotated[int, Field(ge=1)] | None = None
    secret: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not (parts.hostname or parts.scheme == "file") or parts.path[:1] != "/":
            raise ValueError(f"{url!r} is not the address of a repository")
        if parts.password is not None:
            raise ValueError("an address must not contain a password; it would be stored in the log")
        if any(not character.isprintable() or character.isspace() for character in url):
            raise ValueError("an address has no blanks and no control characters")
        return url

    @property
    def title(self) -> str:
        """A short description of the source."""
        return f"{self.url} at {self.ref}" if self.ref else self.url


class UploadedSource(BaseModel):
    """An uploaded file: an archive to unpack, or a Git bundle to clone.

    Attributes:
        name: the file's name, for display.
        parcel: see `broker.coordination.transfers`.
        ref: the ref of a bundle, see `GitSource`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_needs_kind)

    kind: Literal["upload"] = "upload"
    name: Annotated[str, Field(max_length=200)]
    format: Format
    parcel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    ref: Annotated[str, Field(pattern=_REF)] = ""

    @property
    def title(self) -> str:
        """A short description of the source."""
        return f"{self.name} at {self.ref}" if self.ref else self.name


WorkspaceSource = Annotated[GitSource | UploadedSource, Field(discriminator="kind")]


def parse_git_source(text: str, *, depth: int | None = None, secret: str = "") -> GitSource | None:
    """Parse `git+https://host/path#ref`; None if the text has another form.

    Raises:
        UsageError: the text has the prefix but is not a valid repository address, or it is a repository address without
            the prefix.
    """
    if not text.startswith(PREFIX):
        if _ADDRESS_WITHOUT_PREFIX.match(text):
            raise UsageError(f"{text!r} is neither a directory nor the address of a repository.", remedy=_REMEDY)
        return None
    url, _, ref = text.removeprefix(PREFIX).partition("#")
    if urlsplit(url).password is not None:
        raise UsageError(
            "The address of the repository contains a password, which would be stored in the log.",
            remedy="Store it as a secret and pass its name with --clone-secret.",
        )
    try:
        return GitSource(url=url, ref=ref, depth=depth, secret=secret)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not the address of a repository.",
            remedy=_REMEDY,
        ) from error


def find_format(name: str) -> Format | None:
    """Return the format of a file by its name's suffix; None if a workspace cannot start from it."""
    found = re.search(r"(?:\.tar)?\.\w+$", name.lower())
    return FORMATS.get(found.group()) if found else None
