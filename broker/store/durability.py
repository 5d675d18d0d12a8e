"""Detects a store that loses acknowledged writes when its server ends.

Does not: check how often the server writes to its disk (`appendfsync`), which only its administrators can read.
"""

from __future__ import annotations

from collections.abc import Mapping

REMEDY = (
    "Set `appendonly yes` on its server (`CONFIG SET appendonly yes`, and in its configuration file), with "
    "`appendfsync everysec` or `always`."
)


def volatility_of(facts: Mapping[str, str]) -> str:
    """Return a warning if a server's INFO shows no append-only file, else an empty text."""
    if facts.get("aof_enabled", "1") != "0":  # a server that does not report it, such as a provider's own, is trusted
        return ""
    return (
        "THE STORE KEEPS NO APPEND-ONLY FILE: when its server ends, it loses the conversations, queued actions and "
        "budgets since its last snapshot, or all of them if it takes none."
    )
