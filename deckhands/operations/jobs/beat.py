"""Run a beat in the foreground: `python -m deckhands.operations.jobs.beat`. It sends the periodic jobs of `table`."""

from __future__ import annotations

import logging
import sys

from broker.runtime import EXIT_USAGE, BrokerSettings, DeckhandsError, arm, harden_process, logs_json, start_logging
from deckhands.client import print_text
from deckhands.operations.jobs.celery_app import make_jobs_app, run_beat
from deckhands.operations.jobs.table import schedule

_log = logging.getLogger(__name__)


def main() -> None:
    """Send due jobs until the process is asked to stop."""
    harden_process()
    start_logging("beat", is_json=logs_json())
    try:
        settings = BrokerSettings.from_env()
        arm(settings)
    except DeckhandsError as error:
        if logs_json():
            _log.critical("%s", error)
        else:
            print_text(str(error), err=True)
        sys.exit(EXIT_USAGE)
    run_beat(make_jobs_app(settings.celery_url, settings.result_url, schedule()))


if __name__ == "__main__":
    main()
