"""Files that stand for models: scripts and recordings.

Holds: what a conversation names lies below the operator's directory, wherever links lead; only regular files are read,
and of each no more than a bound.
"""

from __future__ import annotations

from pathlib import Path

from broker.runtime import read_regular_file
from controller_worker.providers.errors import LLMConfigError

SCRIPT_LIMIT_BYTES = 16 * 1024 * 1024


def read_model_file(path: Path, beneath: str | None, what: str, *, limit_bytes: int = SCRIPT_LIMIT_BYTES) -> bytes:
    """Return the content of a file that stands for a model.

    Args:
        beneath: the directory in which a conversation may name files, by a path from there or by their whole path;
            None: the operator has named this one.
        what: what it should be.

    Raises:
        LLMConfigError: it cannot be read, is no regular file, is too large or lies elsewhere.
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
                    remedy="Name it by its path from there.",
                )
            path = path.relative_to(root)
        return read_regular_file(str(path), limit_bytes=limit_bytes, beneath=str(root))
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LLMConfigError(f"The {what} {shown} cannot be read: {why}.") from None
