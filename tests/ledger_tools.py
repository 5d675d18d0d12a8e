"""Tools whose effects a ledger counts: functions, a class and a Celery task. EFFECTS_PORT is the port of the ledger."""

from __future__ import annotations

import os

from celery import Celery, Task
from pydantic import BaseModel

from broker.tools.celery_tool import celery_tool
from broker.tools.custom_tools import ToolContext, custom_tool
from tests.effects_ledger import report

PORT = int(os.environ.get("EFFECTS_PORT", "0"))
URL = os.environ.get("EXAMPLE_CELERY_URL", "memory://")

app = Celery("shop", broker=URL, backend=URL if URL.startswith("redis") else "cache+memory://", set_as_current=False)
app.conf.update(task_default_queue="shop")


@custom_tool(outcome="idempotent")
def keyed(context: ToolContext) -> str:
    """Report under the key; may be repeated."""
    return report(PORT, context.idempotency_key, "keyed", "once")


@custom_tool
def plain(context: ToolContext) -> str:
    """Report without regard to the key; must not be repeated."""
    return report(PORT, context.idempotency_key, "plain", "each")


@custom_tool(outcome="checkable")
class Checked:
    """Report without regard to the key; the ledger can be asked."""

    class Action(BaseModel):
        """No arguments."""

    def run(self, action: Action, context: ToolContext) -> str:
        """Report."""
        return report(PORT, context.idempotency_key, "checked", "each")

    def check(self, action: Action, context: ToolContext) -> str | None:
        """Ask whether it was reported."""
        answer = report(PORT, context.idempotency_key, "checked", "seen")
        return answer if answer == "again" else None


class Nothing(BaseModel):
    """No arguments."""


@app.task(name="shop.tasks.ship", bind=True)
def ship(task: Task) -> str:
    """Report under the id of the task, which Celery itself may run again when its broker was away."""
    return report(PORT, task.request.id.removeprefix("deckhands-"), "celery", "once")


shipped = celery_tool("shop.tasks.ship", Nothing, "Ship.", app="tests.ledger_tools:app", name="ship")
TOOLS = ",".join(f"tests.ledger_tools:{name}" for name in ("keyed", "plain", "Checked", "shipped"))
