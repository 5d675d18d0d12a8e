"""Pictures in a workspace, as the editor's `view` shows them to a vision model.

Holds: the format is detected from the content, not from the file name; larger pictures are refused with a hint.
"""

from __future__ import annotations

import os
from binascii import b2a_base64

from tool_worker.host.text_files.file_errors import FileRejectedError
from tool_worker.host.text_files.regular_file import read_regular_file

MAX_PICTURE_BYTES = 4 * 2**20
"""Providers accept five million characters, and base64 adds a third; some providers downscale pictures."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


def is_picture(path: str) -> bool:
    """Return whether a file name has the suffix of a picture."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def picture_url(path: str) -> str:
    """Return a picture as a `data:` address.

    Raises:
        FileRejectedError: it is too large, not a regular file, or not a picture.
    """
    content = read_regular_file(path, MAX_PICTURE_BYTES)
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if content.startswith(beginning)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        kind = "image/webp"
    if kind is None:
        raise FileRejectedError(path, "File is named like a picture, but is not a PNG, JPEG, GIF or WebP.")
    return f"data:{kind};base64,{b2a_base64(content, newline=False).decode()}"
