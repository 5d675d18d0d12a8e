"""Pictures in messages: paths, bytes and addresses, converted to the form of a message.

Holds: a local picture has a format that models accept, and is small enough for them.
Does not: fetch an address; the model's provider does.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from broker.runtime import UsageError

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
    """Return pictures as addresses or data URLs; None: there are none. Reads files.

    Raises:
        UsageError: an item is no picture, cannot be read or is too large; or there are too many.
    """
    if isinstance(images, str | bytes | os.PathLike):
        raise UsageError("The argument images is one picture.", remedy="Pass a list: images=[…].")
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
