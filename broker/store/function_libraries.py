"""The function libraries of the store: their source, their version, and how they are deployed.

Holds: a library is replaced only by one of the same or a newer version. The sources of a version never change: a test
pins their hashes, so a change of Lua needs a new `FUNCTIONS_VERSION`. A worker older than the functions in the store
uses them if they still serve it, and refuses to start otherwise.
Does not: stop an older worker that looked before the newer one loaded its functions; deploy with one `setup` job where
two versions start in the same millisecond.
Keys: the fields `functions` and `functions:<library>` of `deck:store`.
"""

from __future__ import annotations

import hashlib
import logging
from importlib import resources

from broker.runtime.errors import StoreTooNew
from broker.store import keys
from broker.store.connection import Connection

FUNCTIONS_VERSION = 11
"""Of all function libraries together."""
OLDEST_CALLER = 10
"""The oldest version whose workers these functions serve."""
LIBRARIES = {
    "deckhands": ("log/functions.lua", "log/turns.lua", "log/admission.lua", "log/webhooks.lua"),
    "deckhands_governor": ("limits/governor.lua",),
    "deckhands_ledger": ("limits/ledger.lua",),
    "deckhands_batches": ("limits/batches.lua",),
}
"""The function libraries and their files: the one that registers the functions, and what it begins with."""
PRELUDE = "store/prelude.lua"
MOST_DIGITS = 10

logger = logging.getLogger(__name__)


def functions_code(library: str = "deckhands") -> str:
    """Return the source of a function library: its first line names it, then comes what all of them share."""
    folder = resources.files("broker")
    first, *others = LIBRARIES[library]
    own, *parts = (folder.joinpath(file).read_text(encoding="utf-8") for file in (first, PRELUDE, *others))
    name, _, rest = own.partition("\n")
    return "\n".join((name, *parts, rest))


def functions_hash(library: str) -> str:
    """Return what identifies the source of a function library."""
    return hashlib.sha256(functions_code(library).encode()).hexdigest()[:16]


async def deploy(connection: Connection) -> None:
    """Load the function libraries that the store lacks or has in an older version.

    Idempotent.

    Raises:
        StoreTooNew: the functions in the store are newer and no longer serve this version.
    """
    newer = 0
    for library in LIBRARIES:
        newer = max(newer, await _deploy_library(connection, library))
    if newer:
        logger.warning(
            "The store's functions have version %d; this worker has %d and uses the newer ones. Upgrade it.",
            newer,
            FUNCTIONS_VERSION,
        )


async def _deploy_library(connection: Connection, library: str) -> int:
    """Return the version of the library in the store if it is newer; 0: it is ours."""
    field = "functions" if library == "deckhands" else f"functions:{library}"
    stamp = f"{FUNCTIONS_VERSION}:{functions_hash(library)}:{OLDEST_CALLER}"
    found = ((await connection.call("HGET", keys.STORE, field)) or b"").decode(errors="replace")
    version, _, rest = found.partition(":")
    if _number(version) > FUNCTIONS_VERSION:
        oldest = rest.partition(":")[2]
        if _number(oldest) > FUNCTIONS_VERSION:
            raise StoreTooNew(
                f"The store's functions have version {version} and serve workers from version {oldest} on; "
                f"this one has version {FUNCTIONS_VERSION}.",
                remedy="Upgrade Deckhands on this machine.",
            )
        if not await _is_loaded(connection, library):
            raise StoreTooNew(
                f"The store has lost its functions, which were of version {version}; this one has version "
                f"{FUNCTIONS_VERSION} and does not replace newer functions by older ones.",
                remedy="Run `deckhands ls` of the newer version, which loads them again.",
            )
        return int(version)
    if found != stamp or not await _is_loaded(connection, library):
        await connection.call("FUNCTION", "LOAD", "REPLACE", functions_code(library))
        await connection.call("HSET", keys.STORE, field, stamp)
    return 0


def _number(text: str) -> int:
    """Return a version; 0: it is none, and what is loaded is replaced."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < MOST_DIGITS else 0


async def _is_loaded(connection: Connection, library: str) -> bool:
    return bool(await connection.call("FUNCTION", "LIST", "LIBRARYNAME", library))
