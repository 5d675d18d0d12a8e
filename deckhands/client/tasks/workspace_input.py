"""Parse a user's workspace: a directory, the address of a repository, or a file to upload."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from broker.contract import GitSource, UploadedSource, WorkspaceSpec, find_format, parse_git_source
from broker.coordination import check_size, make_content_name
from broker.runtime import UsageError

Directory = WorkspaceSpec | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class WorkspaceInput:
    """The workspace of a task. With neither a path nor a source, it is an empty directory.

    Attributes:
        content: the bytes of the file to upload.
    """

    path: Path | None = None
    source: GitSource | UploadedSource | None = None
    content: bytes | None = None


def parse_workspace(text: str, *, clone_depth: int | None = None, clone_secret: str = "") -> WorkspaceInput:
    """Return the workspace that a text names: a directory, `git+https://…#ref`, or an archive or bundle to upload.

    Raises:
        UsageError: the address cannot be used, or the file cannot be read or is too large.
    """
    if not text.strip():  # from an unset variable, which must not mean the current directory
        raise UsageError("The name of the workspace is empty.", remedy="Name one, or leave it out.")
    source = parse_git_source(text, depth=clone_depth, secret=clone_secret)
    if source is not None:
        return WorkspaceInput(source=source)
    name, _, ref = text.partition("#")
    form = find_format(name)
    if form is None or Path(text).is_dir():
        return WorkspaceInput(path=Path(text))
    try:
        check_size(Path(name).stat().st_size, f"The file {name}")
        content = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"The file {name} cannot be read: {error.strerror}.", remedy="Name another as the workspace (-w)."
        ) from error
    if ref and form != "bundle":
        raise UsageError(
            f"{name} is not a bundle, so it has no {ref!r}.", remedy="Leave out the # and the text after it."
        )
    try:
        uploaded = UploadedSource(name=Path(name).name, format=form, parcel=make_content_name(content), ref=ref)
    except ValueError as error:
        raise UsageError(f"{ref!r} is not a branch, tag or commit.", remedy="Name one after the #.") from error
    return WorkspaceInput(source=uploaded, content=content)
