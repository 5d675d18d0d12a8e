"""A Celery application as users have one: it knows nothing of Deckhands. Its workers are real ones."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery
from pydantic import BaseModel

from broker.tools.celery_tool import celery_tool

URL = os.environ.get("EXAMPLE_CELERY_URL", "memory://")

app = Celery("shop", broker=URL, backend=URL if URL.startswith("redis") else "cache+memory://", set_as_current=False)
app.conf.update(task_default_queue="shop", task_track_started=True)


@app.task(name="shop.tasks.refund")
def refund(order: int, amount: float = 0.0) -> dict[str, object]:
    """Pay an order back, leaving a trace."""
    with Path(os.environ["EXAMPLE_TOOLS_TRACE"]).open("a") as file:
        file.write(f"refund {order}\n")
    if order == 13:
        raise ValueError("no such order")
    if order == 99:  # waits until the gate opens
        with Path(os.environ["EXAMPLE_TOOLS_TRACE"] + ".gate").open() as gate:
            gate.read()
        with Path(os.environ["EXAMPLE_TOOLS_TRACE"]).open("a") as file:
            file.write("through the gate\n")
    return {"order": order, "paid": amount}


class Refund(BaseModel):
    """The amount that was paid back."""

    order: int
    amount: float = 0.0


refund_tool = celery_tool(
    "shop.tasks.refund", Refund, "Pay an order back.", app="tests.example_celery:app", timeout_seconds=30.0
)
stoppable_refund = celery_tool(
    "shop.tasks.refund",
    Refund,
    "Pay an order back, unless stopped.",
    app="tests.example_celery:app",
    name="stoppable_refund",
    may_terminate=True,
)
