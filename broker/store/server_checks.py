"""Checks of a store server by its INFO: known vulnerabilities of its version, and a missing append-only file.

Facts: the advisories of Redis and Valkey for CVE-2025-49844 (with -46817, -46818 and -46819; older ones, such as
CVE-2024-31449, -46981 and CVE-2025-21605, were fixed earlier in every branch), and Redis' for CVE-2026-23479.

Holds: a version is certainly vulnerable only if no vendor is known to ship it with a backported fix.
Does not: know later vulnerabilities; run the newest release of a branch. It also does not check how often the server
writes to its disk (`appendfsync`), which only its administrators can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_Version = tuple[int, int, int]

FIXED: dict[str, tuple[_Version, ...]] = {
    "Redis": ((7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "Valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
}
"""The first release of each branch with the fix; later branches have had it from their start."""
NEVER_FIXED: dict[str, tuple[tuple[int, int], ...]] = {"Redis": ((7, 0),), "Valkey": ()}
"""Branches that ended before the fix. Other branches that are not in `FIXED` are a vendor's own."""
DISTRIBUTION_VERSIONS = {"Redis": ((7, 0, 15), (8, 0, 2)), "Valkey": ((8, 1, 1),)}
"""Versions that Debian and Ubuntu ship and patch without changing the number."""
BLOCKED_CLIENTS_FIXED = (8, 6, 3)

LUA = "CVE-2025-49844 and others: a client that may run scripts may take the server over"
BLOCKED_CLIENTS = "CVE-2026-23479: a client that is evicted while it waits may take the server over"
APPEND_ONLY_REMEDY = (
    "Set `appendonly yes` on its server (`CONFIG SET appendonly yes`, and in its configuration file), with "
    "`appendfsync everysec` or `always`."
)


@dataclass(frozen=True, slots=True)
class Vulnerability:
    """A vulnerability of a server.

    Attributes:
        is_certain: whether the server is refused, unless its operator overrides that.
    """

    text: str
    remedy: str
    is_certain: bool = False


def find_vulnerability(facts: Mapping[str, str]) -> Vulnerability | None:
    """Return the known or possible vulnerability of a server by its INFO; None if there is none."""
    product = "Valkey" if "valkey_version" in facts else "Redis"
    text = facts.get("valkey_version") or facts.get("redis_version", "")
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2]), int(found[3])) if found else None
    if version is None or _lacks_fix(product, version):
        newest = ", ".join(".".join(map(str, fixed)) for fixed in FIXED[product])
        branches = {first[:2] for first in (*FIXED[product], *NEVER_FIXED[product])}
        is_certain = version is not None and version[:2] in branches and version not in DISTRIBUTION_VERSIONS[product]
        return Vulnerability(
            f"The store's server is {product} {text or 'of an unknown version'}, which is vulnerable ({LUA}).",
            f"Use {newest} or newer. If your distribution has backported the fix, set DECKHANDS_STORE_PATCHED=1.",
            is_certain=is_certain,
        )
    if product == "Redis" and version < BLOCKED_CLIENTS_FIXED:
        return Vulnerability(
            f"The store's server is {product} {text}, which is vulnerable ({BLOCKED_CLIENTS}).",
            "Keep its setting `maxmemory-clients 0`, the default, or use 8.6.3 or newer. "
            "If it has the fix, set DECKHANDS_STORE_PATCHED=1.",
        )
    return None


def describe_volatility(facts: Mapping[str, str]) -> str:
    """Return a warning if a server's INFO shows no append-only file, else an empty text."""
    if facts.get("aof_enabled", "1") != "0":  # a server that does not report it, such as a provider's own, is trusted
        return ""
    return (
        "THE STORE KEEPS NO APPEND-ONLY FILE: when its server ends, it loses the conversations, queued actions and "
        "budgets since its last snapshot, or all of them if it takes none."
    )


def describe_missing_replica(facts: Mapping[str, str]) -> str:
    """Return a warning for DECKHANDS_ACKS=replica if a server's INFO shows no replica, else an empty text."""
    if facts.get("connected_slaves", "") != "0":
        return ""
    return "DECKHANDS_ACKS is replica, but the store has no replica: no write is confirmed, and all work waits."


def _lacks_fix(product: str, version: _Version) -> bool:
    fixed = next((first for first in FIXED[product] if first[:2] == version[:2]), FIXED[product][-1])
    return version < fixed
