"""Check the invariants of all logs or of a sample, and find parts of the store without an owner.

Holds: a log that grows while it is read is judged only by invariants that do not depend on its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

from broker.contract import decode_any
from broker.log import ConversationRow, Conversations, EventLog, Violation, find_violations, fold_status
from broker.runtime import (
    CorruptEntry,
    DataLocked,
    EventsLost,
    StoreMisconfigured,
    UnknownConversation,
    format_count,
)
from broker.store import Store, decode_text, parse_number, read_tolerantly
from deckhands.operations.diagnosis.diagnostics import Finding, failed_finding, passed_finding, warning_finding

INVARIANTS, ORPHANS = "invariants", "orphans"
PAGE = 200
SHOWN = 5
MOST_SCANNED = 200_000
UNTOUCHED_SECONDS = 3_600
RESTORE = "Keep the store as it is, and compare with its append-only file and the archive: docs/deployment.md."


@dataclass(slots=True)
class LogFindings:
    """The findings about logs.

    Attributes:
        looked_at: the number of logs read.
        of: the number of all logs.
        broken: the violations, and the conversations that have them.
        unsettled: the number of conversations that may need a worker.
        ownerless: conversations whose owner is not a known worker.
        half_deleted: conversations whose deletion was interrupted.
    """

    of: int = 0
    looked_at: int = 0
    broken: list[tuple[str, Violation]] = field(default_factory=list)
    unsettled: int = 0
    ownerless: list[str] = field(default_factory=list)
    half_deleted: list[str] = field(default_factory=list)


async def read_logs(store: Store, *, sample: int | None, workers: Collection[str]) -> LogFindings:
    """Examine all conversations, and the logs of a sample.

    Args:
        sample: the number of logs, spread over the index and including the newest; None for all.
        workers: the known workers.
    """
    seen = LogFindings(of=await Conversations(store).count())
    step = 1 if sample is None else max(1, -(-seen.of // max(sample, 1)))
    at = 0
    async for row in _iter_rows(store):
        is_busy, is_deleted = await _read_marks(store, row.conversation_id)
        seen.unsettled += is_busy
        if row.owner and row.owner not in workers:
            seen.ownerless.append(row.conversation_id)
        if is_deleted:
            seen.half_deleted.append(row.conversation_id)
        elif at % step == 0 and sample != 0:
            seen.looked_at += 1
            seen.broken += [(row.conversation_id, one) for one in await check_log(store, row.conversation_id)]
        at += 1
    return seen


async def find_ownerless(store: Store, ids: Sequence[str], workers: Collection[str]) -> list[str]:
    """Return the conversations that none of the workers owns; the workers are read after the conversations."""
    rows = await Conversations(store).load_rows(ids)
    return [row.conversation_id for row in rows if row.owner and row.owner not in workers]


async def _iter_rows(store: Store) -> AsyncIterator[ConversationRow]:
    """Yield the conversations of each shard, the newest first."""
    for names in await store.load_shards():
        start = 0
        while True:
            ids = (await read_tolerantly(store.connection, [("ZREVRANGE", names.index, start, start + PAGE - 1)]))[0]
            if not ids:
                break
            for row in await Conversations(store).load_rows([decode_text(one) for one in ids]):
                yield row
            start += len(ids)


async def _read_marks(store: Store, conversation_id: str) -> tuple[bool, bool]:
    command = ("HMGET", (await store.locate(conversation_id)).meta, "busy", "deleted")
    found_marks = (await read_tolerantly(store.connection, [command]))[0]
    busy, deleted = found_marks if isinstance(found_marks, list) else (None, None)
    return decode_text(busy) == "1", deleted is not None


async def check_log(store: Store, conversation_id: str) -> list[Violation]:
    """Check the invariants of one log, the same as in the fault tests."""
    log = EventLog(store)
    try:
        before = await log.load_last_id(conversation_id)
        events = await log.read(conversation_id, decode=decode_any)
        is_still = await log.load_last_id(conversation_id) == before
    except CorruptEntry as error:
        return [Violation("I2", 0, error.message)]
    except (UnknownConversation, EventsLost, DataLocked):  # it has left the store meanwhile, or is unreadable here
        return []
    is_over = is_still and fold_status(events).is_settled
    return find_violations(
        events,
        conversation_id=conversation_id,
        last_event_id=before if is_still else None,
        is_over=is_over,
    )


def report_logs(seen: LogFindings) -> list[Finding]:
    """Convert the findings about logs into a report."""
    findings = []
    if seen.broken:
        names = dict.fromkeys(name for name, _ in seen.broken)
        kinds = Counter(one.invariant for _, one in seen.broken)
        reported = "; ".join(f"{name}: {one.invariant} {one.text}" for name, one in seen.broken[:SHOWN])
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        logs = f"{format_count(len(names), 'log')} of {seen.looked_at}"
        detail = f"{logs} violate invariants ({counts}): {ascii(reported)[1:-1]}"
        findings.append(failed_finding(INVARIANTS, detail, RESTORE))
    elif seen.looked_at or not seen.of:
        findings.append(passed_finding(INVARIANTS, f"{seen.looked_at:,} of {format_count(seen.of, 'log')} checked"))
    if seen.ownerless:
        detail = (
            f"{format_count(len(seen.ownerless), 'conversation')} owned by no worker: {_join_names(seen.ownerless)}"
        )
        remedy = "`deckhands resume ID` wakes one. If it stays so, report it with `deckhands export ID`."
        findings.append(warning_finding(ORPHANS, detail, remedy))
    if seen.half_deleted:
        detail = f"{format_count(len(seen.half_deleted), 'deletion')} not complete: {_join_names(seen.half_deleted)}"
        findings.append(
            warning_finding(
                ORPHANS, detail, "The job `orphans` completes them every hour: run `deckhands jobs` and `beat`."
            )
        )
    return findings


async def find_orphaned_keys(store: Store) -> list[Finding]:
    """Find keys of conversations that do not exist. Needs the right to scan, which workers do not have."""
    cursor: bytes = b"0"
    scanned, orphans = 0, set[str]()
    while scanned < MOST_SCANNED:
        scan = ("SCAN", cursor, "MATCH", "deck:{*}:c:*", "COUNT", 1_000)
        try:
            cursor, keys = await store.connection.call(*scan)
        except StoreMisconfigured as error:
            if "NOPERM" not in error.message:
                raise
            remedy = "The jobs' or the admin's store user may; the job `orphans` searches every hour."
            return [warning_finding(ORPHANS, "this store user may not search for orphaned keys", remedy)]
        scanned += len(keys)
        orphans |= await _find_nameless(store, keys)
        if cursor == b"0":
            break
    if orphans:
        detail = (
            f"keys of {format_count(len(orphans), 'conversation')} that do not exist: {_join_names(sorted(orphans))}"
        )
        return [
            warning_finding(
                ORPHANS, detail, "The job `orphans` removes them: run `deckhands jobs` and `deckhands beat`."
            )
        ]
    return [passed_finding(ORPHANS, f"none in {format_count(scanned, 'key')}")]


async def _find_nameless(store: Store, keys: Sequence[bytes]) -> set[str]:
    by_conversation: dict[str, bytes] = {}
    for key in keys:
        parts = key.decode(errors="replace").split(":")
        if len(parts) > 4 and parts[2] == "c":
            by_conversation.setdefault(parts[3], key)
    ids = list(by_conversation)
    roots = [by_conversation[one].rsplit(b":" + one.encode() + b":", 1)[0] for one in ids]
    commands = [
        ("HEXISTS", root + b":" + one.encode() + b":meta", "last_id") for root, one in zip(roots, ids, strict=True)
    ]
    metas = await read_tolerantly(store.connection, commands)
    lost = [one for one, there in zip(ids, metas, strict=True) if not there]
    idle = await read_tolerantly(store.connection, [("OBJECT", "IDLETIME", by_conversation[one]) for one in lost])
    return {one for one, seconds in zip(lost, idle, strict=True) if parse_number(seconds) >= UNTOUCHED_SECONDS}


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:SHOWN]) + more
