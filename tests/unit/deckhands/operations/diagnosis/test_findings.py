"""Findings about a cluster, from values: settings, workers, queues, logs; each finding with its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from broker.log.invariants import Violation
from broker.runtime.version import read_version
from broker.store.function_library import own_version
from deckhands.operations.diagnosis.diagnostics import Finding
from deckhands.operations.diagnosis.log_findings import LogFindings, report_logs
from deckhands.operations.diagnosis.store_findings import check_settings
from deckhands.operations.diagnosis.worker_findings import WorkerReport, check_workers, report_queues
from deckhands.operations.monitoring.queues import Depth

HERE = f"{read_version()} {own_version().stamp}"


def worker(name: str, role: str = "tool", **said: Any) -> WorkerReport:
    fields = {"left_seconds": 1.5, "version": HERE, "clock_seconds": -1.0, "lag_seconds": 0.0, "routes": frozenset()}
    return WorkerReport(worker_id=name, role=role, **(fields | said))


BOTH = (worker("t"), worker("c", "controller"))


def bad(findings: list[Finding]) -> list[tuple[str, bool]]:
    """Return the names of the bad findings, and whether they are needed; each has a remedy."""
    assert all(finding.remedy for finding in findings if not finding.is_good)
    return [(finding.name, finding.is_needed) for finding in findings if not finding.is_good]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"maxmemory_policy": "noeviction", "used_memory": "5", "maxmemory": "100"}, []),
        ({"maxmemory_policy": "allkeys-lru"}, [("store settings", True)]),
        ({"used_memory": "95", "maxmemory": "100"}, [("store settings", False)]),
        ({"used_memory": "95", "maxmemory": "0", "total_system_memory": "100"}, [("store settings", False)]),
        ({"aof_last_write_status": "err"}, [("store settings", True)]),
        ({"role": "slave"}, [("store settings", True)]),
        ({"used_memory": "garbage", "maxmemory": "nan"}, []),
    ],
)
def test_settings_of_the_server(facts: dict[str, str], expected: list[tuple[str, bool]]) -> None:
    assert bad(check_settings(facts)) == expected


def test_missing_lapsed_old_slow_or_misclocked_workers_are_found() -> None:
    assert bad(check_workers(BOTH, unsettled=3)) == []
    assert bad(check_workers(BOTH[:1], unsettled=0)) == [("workers", False)]
    assert bad(check_workers(BOTH[:1], unsettled=3)) == [("workers", True)]
    for said, name in (
        ({"left_seconds": -4.0}, "workers"),
        ({"version": ""}, "workers' versions"),
        ({"version": "0.0.1 9"}, "workers' versions"),
        ({"clock_seconds": 90.0}, "workers' clocks"),
        ({"lag_seconds": 2.0}, "lag"),
    ):
        findings = check_workers((*BOTH, worker("odd\x1b[2J", **said)), unsettled=1)
        assert bad(findings) == [(name, False)]
        (finding,) = [each for each in findings if not each.is_good]
        assert "odd\\x1b[2J" in finding.detail


def test_queues_that_wait_too_long() -> None:
    late, quick = Depth(3.0, 4.0, 0.0, 600.0), Depth(3.0, 0.0, 0.0, 1.0)
    findings = report_queues({"pool:gpu": late, "ready": quick})
    assert bad(findings) == [("queues", False)]
    assert "pool:gpu: 7 wait, the first for 600 s" in findings[0].detail
    assert bad(report_queues({"ready": quick})) == []


def test_logs_and_what_belongs_to_nobody() -> None:
    assert bad(report_logs(LogFindings(of=10, looked_at=10))) == []
    broken = LogFindings(of=10, looked_at=10, broken=[("c1", Violation("I2", 3, "event 4 is where event 3 belongs"))])
    assert bad(report_logs(broken)) == [("invariants", True)]
    assert "c1: I2 event 4 is" in report_logs(broken)[0].detail
    lost = LogFindings(of=1, looked_at=1, ownerless=[f"c{n}" for n in range(9)], half_deleted=["d1"])
    assert bad(report_logs(lost)) == [("orphans", False), ("orphans", False)]
    assert "c4 and 4 more" in report_logs(lost)[1].detail
