"""The Celery application of the ingress: `celery -A deckhands.ingress.app worker -Q deckhands`.

Remote control: `revoke` stops runs; `active`, `reserved` and `query_task` show unfinished runs, and every ingress
worker of a broker returns the same. `inspect conversations` exists on all workers but returns nothing here, because an
ingress worker owns no conversation.
"""

from __future__ import annotations

from typing import Any

from celery.worker import control
from celery.worker.control import control_command, inspect_command

from broker.celery import add_loop
from broker.runtime import BrokerSettings, DeckhandsError, arm
from deckhands.ingress.evaluations import EvaluationTasks
from deckhands.ingress.ingress_app import make_ingress_app
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.runs import MAX_SHOWN
from deckhands.ingress.service import IngressWorker
from deckhands.ingress.tasks import IngressTasks, evaluate_task

MAX_REVOKED = 1_000
MAX_ID_CHARS = 256
NO_STORE = {"error": "The store does not answer; ask again later."}
celerys_active, celerys_reserved, celerys_query_task = control.active, control.reserved, control.query_task

settings = BrokerSettings.from_env()
arm(settings)
app = make_ingress_app(settings.celery_url, settings.result_url)
evaluations = EvaluationTasks(settings.evaluations, settings.url)
results = TaskResults(app)
ingress_worker = IngressWorker(settings, results, evaluations)
loop_thread = add_loop(app, ingress_worker)
tasks = IngressTasks(app, ingress_worker, loop_thread, results)
app.note_unusable = tasks.note_unusable
app.take_run = tasks.take_run
app.register_task(evaluate_task(evaluations, results))


@inspect_command(name="conversations")  # type: ignore[untyped-decorator]
def conversations(_state: Any) -> list[str]:
    """Return an empty list, because any ingress worker can continue the pending work, which is in the store."""
    return []


@inspect_command(name="active")  # type: ignore[untyped-decorator]
def active(state: Any, **_options: Any) -> Any:
    """List the short tasks that this worker runs, and the runs whose agents work."""
    return _with_runs(state, celerys_active(state, safe=True), has_started=True)


@inspect_command(name="reserved")  # type: ignore[untyped-decorator]
def reserved(state: Any, **_options: Any) -> Any:
    """List the messages that this worker has reserved, and the runs whose agents have not started."""
    return _with_runs(state, celerys_reserved(state), has_started=False)


def _with_runs(state: Any, messages: list[dict[str, Any]], *, has_started: bool) -> Any:
    messages = [info for info in messages if info["name"] in state.app.tasks]  # another worker may share the process
    if state.app is not app:
        return messages
    try:
        found = tasks.query_runs(lambda runs: runs.in_flight(has_started=has_started))
    except (TimeoutError, DeckhandsError):
        return NO_STORE
    return messages + [info | {"hostname": state.hostname} for info in found]


@inspect_command(name="query_task", variadic="ids", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def query_task(state: Any, ids: Any = None, **_options: Any) -> Any:
    """Return the tasks that are unfinished runs, each as `active` or `reserved` with its details."""
    named = _ids_in(ids)[:MAX_SHOWN]
    if state.app is not app:
        return celerys_query_task(state, named)
    try:
        found = tasks.query_runs(lambda runs: runs.query(named))
    except (TimeoutError, DeckhandsError):
        return NO_STORE
    return {task_id: (status, info | {"hostname": state.hostname}) for task_id, (status, info) in found.items()}


def _ids_in(ids: Any) -> list[str]:
    """Return the task ids of a command's arguments."""
    listed = ids if isinstance(ids, list) else [ids]
    return [name for name in listed[:MAX_REVOKED] if isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARS]


@control_command(name="revoke")  # type: ignore[untyped-decorator]
def revoke(_state: Any, task_id: Any = None, **_options: Any) -> dict[str, str]:
    """Stop runs, started or not. The revocation is stored."""
    named = _ids_in(task_id)
    if not tasks.revoke(named):
        return {"error": "Too many tasks are being revoked; revoke these again later."}
    return {"ok": f"{len(named)} tasks revoked"}
