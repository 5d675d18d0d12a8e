"""Runs inside DBOS' environment: enqueues as many one-step workflows as each line of standard input says.

Its argument is the URL of the database. The answer to a line is one of JSON: seconds until all are enqueued and until
all have a result, and the CPU seconds of this process meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

from dbos import DBOS

POLLING_SECONDS = 0.02
"""How often DBOS looks into its queue; its default of a second would be the measurement."""


@DBOS.step()
def ask(task: str) -> str:
    """The one step, which does nothing."""
    return f"{task} Done."


@DBOS.workflow()
def run(task: str) -> str:
    """One run."""
    return ask(task)


def main() -> None:
    """Answer every line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    DBOS(config={"name": "benchmark", "system_database_url": sys.argv[1], "log_level": "WARNING"})
    DBOS.launch()
    DBOS.register_queue("runs", polling_interval_sec=POLLING_SECONDS)
    print(json.dumps({"version": version("dbos")}), file=answers, flush=True)
    for line in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        handles = [DBOS.enqueue_workflow("runs", run, "Do it.") for _ in range(int(line))]
        enqueued = time.perf_counter() - began
        for handle in handles:
            assert handle.get_result(polling_interval_sec=POLLING_SECONDS) == "Do it. Done."
        found = {"enqueued": enqueued, "seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
