"""A collector that is away is reported once, however many spans could not be sent."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

EXPORTING = """
import logging, time
logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
from broker.runtime.tracing import REPORTING, _FirstReportOnly
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk import _shared_internal
loggers = {trace_exporter._logger.name, _shared_internal._logger.name}
assert loggers == set(REPORTING), loggers
"""


def test_the_names_are_those_of_the_exporters_loggers() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    subprocess.run([sys.executable, "-c", EXPORTING], check=True)


def test_only_the_first_report_is_let_through(caplog: pytest.LogCaptureFixture) -> None:
    from broker.runtime.tracing import REPORTING, _FirstReportOnly

    seldom = _FirstReportOnly()
    loggers = [logging.getLogger(name) for name in REPORTING]
    for logger in loggers:
        logger.addFilter(seldom)
    try:
        for number in range(3):
            for logger in loggers:
                logger.warning("report %d", number)
    finally:
        for logger in loggers:
            logger.removeFilter(seldom)
    assert [record.getMessage() for record in caplog.records] == ["report 0"]
