"""Markdown files with YAML front matter, as skills and definitions of agents have it.

Untrusted: an author of a repository may write them. The cost of reading one is linear in its length, see
`broker.runtime.front_matter`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from broker.contract.plain_json import replace_surrogates

MAX_FILE_BYTES = 64 * 1024
"""The size of the start of a file that is read."""
MAX_DESCRIPTION_CHARS = 1_024
"""As in the AgentSkills specification."""

_log = logging.getLogger(__name__)


def read_start(path: Path) -> str | None:
    """Return the start of a file; None, with a warning, if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        _log.warning("%s cannot be read: %s", path, error.strerror)
        return None


def read_files(top: Path, paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield the path below `top` and the start of each file that can be read. Links are not followed."""
    for path in paths:
        if not path.is_symlink() and (text := read_start(path)) is not None:
            yield path.relative_to(top).as_posix(), text


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Split a file into front matter and text.

    Raises:
        ValueError: the front matter is not YAML, or too large.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        return {}, text
    end = text.find("\n---", 3)
    if end < 0:
        return {}, text
    from broker.runtime import parse_front_matter  # imports YAML

    return parse_front_matter(text[4:end]), text[end + 4 :].partition("\n")[2]


def describe_text(given: Any, content: str) -> str:
    """Return the given description on one line, or else the first line of the content that is no heading."""
    lines = (line.strip() for line in content.splitlines())
    text = str(given) if given else next((line for line in lines if line and not line.startswith("#")), "")
    text = " ".join(replace_surrogates(text).split())
    return shorten_text(text, MAX_DESCRIPTION_CHARS)


def shorten_text(text: str, limit: int) -> str:
    """Return a text with at most this many characters; a shortened one ends with `…`."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
