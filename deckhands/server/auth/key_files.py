"""Keys in files of the user who runs a server on their own machine: its API key, and the token of its metrics.

An agent whose workspace has network access can reach every port of this machine, so each server there requires a key.

Holds: a revoked key is not replaced until its file is removed; a file is readable by its owner only, and is written
atomically.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from broker.runtime import UsageError
from deckhands.server.auth.api_keys import EVERY_TENANT, TOKEN, AccessDenied, ApiKeys, Scope

NAME = "this machine"
REQUESTS_PER_MINUTE = 6_000
MAX_BYTES = 4_096


async def load_api_key(keys: ApiKeys, path: Path) -> bool:
    """Ensure that a file contains a valid API key. If the store does not know its key, create one and write it there.

    Returns:
        Whether the key is valid; a revoked key is not replaced.

    Raises:
        UsageError: the file cannot be read or written.
    """
    token = _read(path)
    if TOKEN.fullmatch(token):
        try:
            await keys.check(token)
        except AccessDenied as error:
            if error.code == "key_revoked":
                return False
        else:
            return True
    _, token = await keys.add(NAME, tenant=EVERY_TENANT, scopes=Scope, requests_per_minute=REQUESTS_PER_MINUTE)
    _write(path, token)
    return True


def load_token(path: Path) -> str:
    """Return the token in a file; create it if the file has none.

    Raises:
        UsageError: the file cannot be read or written.
    """
    if not (token := _read(path)):
        token = secrets.token_urlsafe(32)
        _write(path, token)
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(MAX_BYTES).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unusable(path, error) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{text}\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The key file {path} cannot be used: {error.strerror}.",
        remedy="Make it readable and its directory writable for you, or set DECKHANDS_HOME to another directory.",
    )
