"""The examination of a running cluster: every check with its finding and its remedy."""

from __future__ import annotations

from broker.runtime import StoreError
from broker.store import MultiplexedConnection, server_facts
from deckhands.operations.diagnosis import log_findings, store_findings, worker_findings
from deckhands.operations.diagnosis.diagnostics import Finding
from deckhands.operations.diagnosis.log_findings import judged_logs, orphaned_keys, read_logs, still_ownerless
from deckhands.operations.diagnosis.looking import OVERWRITTEN, broken, examined, store_of
from deckhands.operations.diagnosis.store_findings import functions_findings, rights_findings, settings_findings
from deckhands.operations.diagnosis.worker_findings import queue_findings, workers_of


async def examine_cluster(url: str, *, sample: int | None) -> list[Finding]:
    """Examine the cluster behind a store. Returns nothing if the store does not answer or was never used.

    Writes nothing and calls no function of the store, so a store user with read access is enough. The findings include
    the checks that this user may not perform.

    Args:
        sample: how many logs to check; None: all, 0: none.
    """
    connection = MultiplexedConnection(url)
    findings: list[Finding] = []
    try:
        store = await store_of(connection)
        if store is None:
            return []

        async def settings() -> list[Finding]:
            return settings_findings(await server_facts(connection))

        findings += await examined(store_findings.SETTINGS, settings)
        findings += await rights_findings(url)
        findings += await examined(store_findings.FUNCTIONS, lambda: functions_findings(connection))
        workers = await workers_of(store)
        there = {worker.worker_id for worker in workers}
        seen = log_findings.Logs()

        async def logs() -> list[Finding]:
            nonlocal seen
            seen = await read_logs(store, sample=sample, workers=there)
            if seen.ownerless:  # or a worker has started meanwhile
                later = {worker.worker_id for worker in await workers_of(store)}
                seen.ownerless = await still_ownerless(store, seen.ownerless, later)
            return judged_logs(seen)

        of_logs = await examined(log_findings.INVARIANTS, logs)
        findings += worker_findings.worker_findings(workers, unsettled=seen.unsettled)
        findings += await examined(worker_findings.QUEUES, lambda: queue_findings(store, workers))
        findings += of_logs
        findings += await examined(log_findings.ORPHANS, lambda: orphaned_keys(store))
    except StoreError as error:
        findings.append(broken("cluster", f"cannot be examined: {error.message}", error.remedy or OVERWRITTEN))
    finally:
        await connection.aclose()
    return findings
