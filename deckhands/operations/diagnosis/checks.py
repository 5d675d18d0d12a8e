"""Read a store without changing it: connections that load no functions, and checks that tolerate a missing right.

Holds: only commands that read. A missing right of the store user becomes a finding and hides no other finding.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from broker.runtime import SYSTEM_CLOCK, BrokerSettings, DeckhandsError, SharedClock, StoreMisconfigured
from broker.store import (
    STORE,
    Connection,
    MasterKeys,
    ShardLayout,
    Store,
    decode_text,
    parse_numbers,
    read_tolerantly,
    to_pairs,
)
from deckhands.operations.diagnosis.diagnostics import Finding

PATIENCE_SECONDS = 5.0
REMEDY = "Name a store user with more rights in DECKHANDS_URL, such as that of a worker or the admin."
OVERWRITTEN = "If a key has another type, it was overwritten: docs/deployment.md, What cannot be read."


async def find_store(connection: Connection) -> Store | None:
    """Return the store behind a connection, unchanged; None if it was never used or was overwritten."""
    about = to_pairs((await read_tolerantly(connection, [("HGETALL", STORE)]))[0])
    generation = decode_text(about.get("generation"))
    try:
        layout = ShardLayout(*parse_numbers(decode_text(about.get("shards"))))
    except ValueError:
        return None
    return Store(
        connection=connection,
        layout=layout,
        generation=generation,
        clock=SharedClock(SYSTEM_CLOCK),
        patience_seconds=PATIENCE_SECONDS,
        warnings=(),
        masters=MasterKeys.load(BrokerSettings.from_env()),
    )


async def run_check(name: str, check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    """Return the findings of a check, or a finding that it lacks a right."""
    try:
        return await check()
    except StoreMisconfigured as error:
        if "NOPERM" not in error.message:
            raise
        return [Finding(name, False, False, "this store user may not read it", REMEDY)]
    except DeckhandsError as error:
        return [Finding(name, False, True, f"cannot be examined: {error.message}", error.remedy or OVERWRITTEN)]


def passed_finding(name: str, detail: str) -> Finding:
    """Return a finding of a passed check."""
    return Finding(name, is_good=True, is_needed=False, detail=detail)


def warning_finding(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that needs attention although the cluster works."""
    return Finding(name, is_good=False, is_needed=False, detail=detail, remedy=remedy)


def failed_finding(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that stops the cluster or breaks one of its promises."""
    return Finding(name, is_good=False, is_needed=True, detail=detail, remedy=remedy)
