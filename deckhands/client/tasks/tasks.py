"""The parts of a task as users write them: text, title, id, output schema, pictures and workspace.

A picture is a path, bytes or an address. A workspace is a directory, the address of a repository, or a file to upload.

Holds: a local picture has a format that models accept, and is small enough for them.
Does not: fetch an address; the model's provider does.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from broker.contract import GitSource, OutputSpec, UploadedSource, WorkspaceSpec, find_format, parse_git_source
from broker.coordination import check_size, make_content_name
from broker.runtime import UsageError
from broker.tools import check_output_schema

MAX_TASK_CHARS = 100_000
MAX_TITLE_CHARS = 80


def to_output_spec(output: type[BaseModel] | Mapping[str, Any]) -> OutputSpec:
    """Return the specification of an output, given as a Pydantic model or a JSON Schema.

    Raises:
        UsageError: the schema cannot be used.
    """
    schema = dict(output) if isinstance(output, Mapping) else output.model_json_schema()
    check_output_schema(schema)
    try:
        return OutputSpec(json_schema=schema)
    except ValidationError as error:
        raise UsageError(f"The schema of the output cannot be used: {error.errors()[0]['msg']}.") from error


def check_task(task: str, *, name: str = "task") -> None:
    """Check that a text can be given to an agent.

    Raises:
        UsageError: it is empty or longer than 100,000 characters.
    """
    if not task.strip():
        raise UsageError(f"The {name} is empty.", remedy="Describe the task.")
    if len(task) > MAX_TASK_CHARS:
        raise UsageError(
            f"The {name} has {len(task):,} characters; the limit is {MAX_TASK_CHARS:,}.",
            remedy="Put the long part into a file of the workspace, and name the file.",
        )


def derive_title(task: str) -> str:
    """Return a title for a task: its first line, cut to 80 characters."""
    line = task.strip().splitlines()[0].strip()
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1] + "…"


def derive_conversation_id(idempotency_key: str) -> str:
    """Return the id of the conversation that belongs to an idempotency key.

    Raises:
        UsageError: the key is empty.
    """
    if not idempotency_key:
        raise UsageError("The idempotency key is empty.", remedy="Give one, or leave the option out.")
    return "k" + sha256(idempotency_key.encode("utf-8", "surrogatepass")).hexdigest()[:25]


def derive_task_conversation_id(task_id: str) -> str:
    """Return the id of the conversation for a Celery task `deckhands.run` or `deckhands.submit`.

    Raises:
        UsageError: the task's id is empty.
    """
    if not task_id:
        raise UsageError("The id of the Celery task is empty.", remedy="Give the id that Celery has returned for it.")
    return derive_conversation_id(f"celery:{task_id}")


MAX_IMAGES = 20
MAX_IMAGE_BYTES = 5 * 2**20
MAX_ADDRESS_CHARS = 2_000
MAX_TOTAL_BYTES = 10 * 2**20
"""The limit for all pictures of one message, which is one event."""
ADDRESSES = ("https://", "http://")
DATA = "data:image/"
_VISIBLE = re.compile("[!-~]+")
_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))

Image = str | os.PathLike[str] | bytes
ImageUrl = Annotated[str, Field(pattern=r"^(https?://|data:image/)")]
"""A picture as an address or a data URL. Never a path, which would name a file of the reading machine."""


def to_image_urls(images: Iterable[Image]) -> tuple[str, ...] | None:
    """Return pictures as addresses or data URLs; None for no pictures. Reads files.

    Raises:
        UsageError: an item is no picture, cannot be read or is too large; or there are too many.
    """
    if isinstance(images, str | bytes | os.PathLike):
        raise UsageError("`images` must be a list.", remedy="Pass a list: images=[…].")
    found = tuple(_to_url(image) for image in images)
    if len(found) > MAX_IMAGES:
        raise UsageError(f"There are {len(found)} pictures; the limit of a message is {MAX_IMAGES}.")
    if sum(map(len, found)) > MAX_TOTAL_BYTES:
        raise UsageError(f"The pictures have more than {MAX_TOTAL_BYTES:,} bytes together.", remedy="Send fewer.")
    return found or None


def _to_url(image: Image) -> str:
    if isinstance(image, bytes):
        return _to_data_url(image, "A picture")
    if isinstance(image, str) and image.startswith((*ADDRESSES, DATA)):
        limit = MAX_ADDRESS_CHARS if image.startswith(ADDRESSES) else MAX_IMAGE_BYTES * 2
        if len(image) > limit or _VISIBLE.fullmatch(image) is None:
            raise UsageError(f"The picture {ascii(image)[:100]} is too long or no address.", remedy="Pass its bytes.")
        return image
    if not isinstance(image, str | os.PathLike):
        raise UsageError(f"{ascii(image)[:100]} is not a picture.", remedy="Pass a path, bytes, or an address.")
    path = Path(image)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"The picture {ascii(str(path))[1:-1][:300]} cannot be read: {why}.") from error
    return _to_data_url(content, f"The picture {ascii(str(path))[1:-1][:300]}")


def _to_data_url(content: bytes, name: str) -> str:
    if len(content) > MAX_IMAGE_BYTES:
        raise UsageError(f"{name} has more than {MAX_IMAGE_BYTES:,} bytes.", remedy="Make it smaller.")
    kind = next((kind for magic, kind in _KINDS if content.startswith(magic)), "")
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        kind = "webp"
    if not kind:
        raise UsageError(f"{name} is not a PNG, JPEG, GIF or WebP file.", remedy="Convert it to one of them.")
    return f"{DATA}{kind};base64,{base64.b64encode(content).decode()}"


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
        UsageError: the address is invalid, or the file cannot be read or is too large.
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
