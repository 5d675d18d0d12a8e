"""What a workspace begins with, if it is not an existing directory: a Git repository, or a file that was uploaded.

Holds: no address carries a password, because addresses stand in the log; nothing in one is taken for an option by git.
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
"""What the end of a file's name says of its format."""

_ADDRESS_WITHOUT_PREFIX = re.compile(r"(ssh|git|https?)://|[\w.-]+@[\w.-]+:")
_REMEDY = (
    "Write git+https://HOST/PATH#BRANCH, or git+http:// or git+file://. Nothing is cloned over ssh: use https with a "
    "token (--clone-secret), or clone it yourself and name the directory or a `git bundle`."
)

_URL = r"^(https?://([^\s/:@]+@)?([^\s/:@]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?|file://)/\S*$"
"""For readers of the schema: all that the validator takes, and little else."""
_REF = r"^([A-Za-z0-9._/@+][A-Za-z0-9._/@+-]{0,199})?$"


def _needs_kind(schema: dict[str, Any]) -> None:
    """Say in the schema that a source is told from another by its kind."""
    schema["required"] = ["kind", *schema["required"]]


class GitSource(BaseModel):
    """A repository that is cloned.

    Attributes:
        url: `https://`, `http://` or `file://` (a repository on the tool worker's own host).
        ref: a branch, a tag or the 40 digits of a commit; empty: the repository's own choice.
        depth: how many commits of the history come along; None: all.
        secret: the name of the conversation's secret that is the password or token; empty: none is needed.
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
            raise ValueError("an address must not hold a password; it would stand in the log")
        if any(not character.isprintable() or character.isspace() for character in url):
            raise ValueError("an address has no blanks and no control characters")
        return url

    @property
    def title(self) -> str:
        """The source in a few words."""
        return f"{self.url} at {self.ref}" if self.ref else self.url


class UploadedSource(BaseModel):
    """A file that was put beside the log: an archive that is unpacked, or a Git bundle that is cloned.

    Attributes:
        name: of the file, for people.
        parcel: see `broker.coordination.stored_files`.
        ref: of a bundle, see `GitSource`.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_needs_kind)

    kind: Literal["upload"] = "upload"
    name: Annotated[str, Field(max_length=200)]
    format: Format
    parcel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    ref: Annotated[str, Field(pattern=_REF)] = ""

    @property
    def title(self) -> str:
        """The source in a few words."""
        return f"{self.name} at {self.ref}" if self.ref else self.name


WorkspaceSource = Annotated[GitSource | UploadedSource, Field(discriminator="kind")]


def git_source(text: str, *, depth: int | None = None, secret: str = "") -> GitSource | None:
    """Read `git+https://host/path#ref`; None for what does not begin so.

    Raises:
        UsageError: it begins so and is not a repository's address, or it is one that is not written so.
    """
    if not text.startswith(PREFIX):
        if _ADDRESS_WITHOUT_PREFIX.match(text):
            raise UsageError(f"{text!r} is neither a directory nor the address of a repository.", remedy=_REMEDY)
        return None
    url, _, ref = text.removeprefix(PREFIX).partition("#")
    if urlsplit(url).password is not None:
        raise UsageError(
            "The address of the repository holds a password, which would stand in the log.",
            remedy="Keep it as a secret and name that by --clone-secret.",
        )
    try:
        return GitSource(url=url, ref=ref, depth=depth, secret=secret)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not the address of a repository.",
            remedy=_REMEDY,
        ) from error


def format_of(name: str) -> Format | None:
    """Return the format that a file's name speaks of; None if it is none that a workspace can begin with."""
    found = re.search(r"(?:\.tar)?\.\w+$", name.lower())
    return FORMATS.get(found.group()) if found else None
