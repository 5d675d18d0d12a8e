"""The Celery application of doors: `celery -A deckhands.door.app worker -Q deckhands`.

Remote control: `revoke` stops runs; `inspect conversations` is answered as by all workers, and a door holds none.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command, inspect_command

from broker.celery.bootstep import add_loop
from broker.celery.door_app import make_door_app
from broker.celery.door_results import TaskResults
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings
from deckhands.door.evaluations import Evaluations
from deckhands.door.service import Door
from deckhands.door.tasks import DoorTasks, evaluate_task

MAX_REVOKED = 1_000
MAX_ID_CHARS = 256

settings = BrokerSettings.from_env()
arm(settings)
app = make_door_app(settings.celery_url, settings.result_url)
evaluations = Evaluations(settings.evaluations, settings.url)
results = TaskResults(app)
door = Door(settings, results, evaluations)
loop_thread = add_loop(app, door)
tasks = DoorTasks(app, door, loop_thread)
app.note_unusable = tasks.note_unusable
app.register_task(evaluate_task(evaluations, results))


@inspect_command(name="conversations")  # type: ignore[untyped-decorator]
def conversations(_state: Any) -> list[str]:
    """List nothing: what doors wait for is in the store, and any door takes it up."""
    return []


@control_command(name="revoke")  # type: ignore[untyped-decorator]
def revoke(_state: Any, task_id: Any = None, **_options: Any) -> dict[str, str]:
    """Stop runs, whether they have begun or not; the store remembers it."""
    ids = task_id if isinstance(task_id, list) else [task_id]
    named = [name for name in ids[:MAX_REVOKED] if isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARS]
    if not tasks.revoke(named):
        return {"error": "Too many tasks are being revoked; revoke these again later."}
    return {"ok": f"{len(named)} tasks revoked"}
