"""Agents on a schedule of your own application's beat.

    DECKHANDS_CELERY=redis://127.0.0.1:6379/1 celery -A celery_beat beat

DECKHANDS_CELERY is the address that `deckhands up` prints behind `celery:`, with the password. Run it in this directory.
Each message has another task id, so two beats begin two agents: run one, or use redbeat, which holds a lock. Nothing
here imports Deckhands. `deckhands schedule add` needs no application and begins each tick once.
"""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

address = os.environ["DECKHANDS_CELERY"]
app = Celery("reports", broker=address, backend=address)
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {
    "review-every-morning": {
        "task": "deckhands.run",
        "schedule": crontab(hour=6, minute=30, day_of_week="mon-fri"),
        "args": ["Review what was merged since yesterday, and list what worries you."],
        "kwargs": {
            "model": os.environ.get("DECKHANDS_MODEL"),
            "workspace": "git+https://github.com/me/shop#main",
            "labels": {"example": "celery-beat"},
        },
        # An agent that no worker has begun within an hour is revoked.
        "options": {"queue": "deckhands", "expires": 3600},
    },
}
