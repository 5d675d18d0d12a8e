"""Whether a store keeps what it acknowledged when its server ends.

Does not: see how often the server writes to its disk (`appendfsync`), which it says only to its administrators.
"""

from __future__ import annotations

from collections.abc import Mapping

REMEDY = (
    "Set `appendonly yes` on its server (`CONFIG SET appendonly yes`, and in its configuration file), with "
    "`appendfsync everysec` or `always`."
)


def volatility_of(facts: Mapping[str, str]) -> str:
    """Return what a server would lose, by what it says of itself (INFO); empty: it has an append-only file."""
    if facts.get("aof_enabled", "1") != "0":  # a server that does not say, such as a provider's own, is trusted
        return ""
    return (
        "THE STORE KEEPS NO APPEND-ONLY FILE: when its server ends, it loses the conversations, queued actions and "
        "budgets since its last snapshot, or all of them if it takes none."
    )
