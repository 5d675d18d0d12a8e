"""Reads files that replace models: scripts and recordings.

Holds: a file named by a conversation lies below the operator's directory, even through links. Only regular files are
read, up to a size limit.
"""

from __future__ import annotations

from pathlib import Path

from broker.runtime import read_regular_file
from controller_worker.providers.errors import LLMConfigError

SCRIPT_LIMIT_BYTES = 16 * 1024 * 1024


def read_model_file(path: Path, beneath: str | None, what: str, *, limit_bytes: int = SCRIPT_LIMIT_BYTES) -> bytes:
    """Return the content of a script or a recording.

    Args:
        beneath: the directory below which a conversation may name files, by relative or absolute path. None: the
            operator named this file.
        what: the kind of file, for errors.

    Raises:
        LLMConfigError: the file is unreadable, not a regular file, too large, or outside of the directory.
    """
    shown = ascii(str(path))[:300]
    try:
        if beneath is None:
            return read_regular_file(str(path.expanduser()), limit_bytes=limit_bytes)
        root = Path(beneath).expanduser().absolute()
        if path.is_absolute():
            if root not in path.parents:
                raise LLMConfigError(
                    f"The {what} {shown} is not in the directory of scripts of this cluster.",
                    remedy="Use a path relative to that directory.",
                )
            path = path.relative_to(root)
        return read_regular_file(str(path), limit_bytes=limit_bytes, beneath=str(root))
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LLMConfigError(f"The {what} {shown} cannot be read: {why}.") from None
