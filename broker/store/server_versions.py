"""Which versions of the store's server have holes that are known, and which have the fix.

Facts: the advisories of Redis and Valkey for CVE-2025-49844 (with -46817, -46818 and -46819; what is older, such as
CVE-2024-31449, -46981 and CVE-2025-21605, was fixed before in every branch), and Redis' for CVE-2026-23479.

Holds: a version is certain to have a hole only if nobody is known to ship it with the fix put back into it.
Does not: know holes that were found later; the newest release of a branch is the one to run.
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
"""The first release of each branch that has the fix; later branches began with it."""
NEVER_FIXED: dict[str, tuple[tuple[int, int], ...]] = {"Redis": ((7, 0),), "Valkey": ()}
"""Branches that ended before; others that are not in `FIXED` are a vendor's own."""
OF_DISTRIBUTIONS = {"Redis": ((7, 0, 15), (8, 0, 2)), "Valkey": ((8, 1, 1),)}
"""What Debian and Ubuntu ship, and patch without another number."""
BLOCKED_CLIENTS_FIXED = (8, 6, 3)

LUA = "CVE-2025-49844 and others: a client that may run scripts may take the server over"
BLOCKED_CLIENTS = "CVE-2026-23479: a client that is evicted while it waits may take the server over"


@dataclass(frozen=True, slots=True)
class Weakness:
    """What a server's version says against it.

    Attributes:
        is_certain: whether it is refused, unless its operator knows better.
    """

    text: str
    remedy: str
    is_certain: bool = False


def weakness_of(facts: Mapping[str, str]) -> Weakness | None:
    """Return the hole that a server has, or may have, by what it says of itself (INFO); None: none is known."""
    product = "Valkey" if "valkey_version" in facts else "Redis"
    text = facts.get("valkey_version") or facts.get("redis_version", "")
    version = _parsed(text)
    if version is None or _lacks_the_fix(product, version):
        newest = ", ".join(".".join(map(str, fixed)) for fixed in FIXED[product])
        branches = {first[:2] for first in (*FIXED[product], *NEVER_FIXED[product])}
        is_certain = version is not None and version[:2] in branches and version not in OF_DISTRIBUTIONS[product]
        return Weakness(
            f"The store's server is {product} {text or 'of an unknown version'}, which has a known hole ({LUA}).",
            f"Use {newest} or newer. If a distribution has put the fix into it, set DECKHANDS_STORE_PATCHED=1.",
            is_certain=is_certain,
        )
    if product == "Redis" and version < BLOCKED_CLIENTS_FIXED:
        return Weakness(
            f"The store's server is {product} {text}, which has a known hole ({BLOCKED_CLIENTS}).",
            "Keep its setting `maxmemory-clients 0`, the default, or use 8.6.3 or newer. "
            "If it is closed, set DECKHANDS_STORE_PATCHED=1.",
        )
    return None


def _lacks_the_fix(product: str, version: _Version) -> bool:
    fixed = next((first for first in FIXED[product] if first[:2] == version[:2]), None)
    return version < fixed if fixed else version < FIXED[product][-1]


def _parsed(text: str) -> _Version | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None
