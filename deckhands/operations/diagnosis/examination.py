"""The examination of a running cluster: every check with its finding and its remedy."""

from __future__ import annotations

from broker.runtime import StoreError
from broker.store import connect, load_server_facts
from deckhands.operations.diagnosis import log_findings, store_findings, worker_findings
from deckhands.operations.diagnosis.diagnostics import OVERWRITTEN, Finding, failed_finding, find_store, run_check
from deckhands.operations.diagnosis.log_findings import find_orphaned_keys, find_ownerless, read_logs, report_logs
from deckhands.operations.diagnosis.store_findings import (
    check_encryption,
    check_functions,
    check_rights,
    check_settings,
)
from deckhands.operations.diagnosis.worker_findings import check_queues, read_workers


async def examine_cluster(url: str, *, sample: int | None) -> list[Finding]:
    """Examine the cluster behind a store. Returns nothing if the store does not answer or was never used.

    Writes nothing and calls no function of the store, so a store user with read access is enough. The findings include
    the checks that this user may not perform.

    Args:
        sample: how many logs to check; None for all, 0 for none.
    """
    connection = connect(url)
    findings: list[Finding] = []
    try:
        store = await find_store(connection)
        if store is None:
            return []

        async def settings() -> list[Finding]:
            return check_settings(await load_server_facts(connection))

        findings += await run_check(store_findings.SETTINGS, settings)
        findings += await check_rights(url)
        findings += await run_check(store_findings.FUNCTIONS, lambda: check_functions(connection))
        findings += await run_check(store_findings.ENCRYPTION, lambda: check_encryption(store))
        workers = await read_workers(store)
        there = {worker.worker_id for worker in workers}
        seen = log_findings.LogFindings()

        async def logs() -> list[Finding]:
            nonlocal seen
            seen = await read_logs(store, sample=sample, workers=there)
            if seen.ownerless:  # or a worker has started meanwhile
                later = {worker.worker_id for worker in await read_workers(store)}
                seen.ownerless = await find_ownerless(store, seen.ownerless, later)
            return report_logs(seen)

        of_logs = await run_check(log_findings.INVARIANTS, logs)
        findings += worker_findings.check_workers(workers, unsettled=seen.unsettled)
        findings += await run_check(worker_findings.QUEUES, lambda: check_queues(store, workers))
        findings += of_logs
        findings += await run_check(log_findings.ORPHANS, lambda: find_orphaned_keys(store))
    except StoreError as error:
        findings.append(failed_finding("cluster", f"cannot be examined: {error.message}", error.remedy or OVERWRITTEN))
    finally:
        await connection.aclose()
    return findings
