"""A worker of plain Celery whose task does nothing, with the pool, the broker and the events of an ingress.

`python -m benchmarks.plain_celery` runs it on the broker that `DECKHANDS_CELERY_URL` names.
"""

from __future__ import annotations

import os

from celery import Celery

QUEUE = "plain"
TASK = "plain.nothing"

url = os.environ.get("DECKHANDS_CELERY_URL", "")
app = Celery("plain", broker=url, backend=url, set_as_current=False)
app.conf.update(task_acks_late=True, worker_send_task_events=True, worker_prefetch_multiplier=8)


@app.task(name=TASK)  # type: ignore[untyped-decorator]
def nothing(*_arguments: object, **_options: object) -> None:
    """Do nothing."""


if __name__ == "__main__":
    app.Worker(
        pool_cls="threads", concurrency=8, queues=[QUEUE], without_gossip=True, without_mingle=True, quiet=True
    ).start()
