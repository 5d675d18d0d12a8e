"""The Celery application of controller workers: `celery -A controller_worker.app worker`.

Remote control: `inspect conversations` lists a worker's conversations, `control drain` stops it from claiming more.
Celery's own command line knows both if it is called with `-A controller_worker.app`.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

from celery.worker.control import control_command, inspect_command

from broker.celery import add_loop, make_app
from controller_worker.loop import ControllerConsumer
from controller_worker.settings import load_controller_settings

settings = load_controller_settings()
app = make_app("controller", settings.variables.celery_url)
consumer = ControllerConsumer(settings)
loop_thread = add_loop(app, consumer)


@inspect_command()  # type: ignore[untyped-decorator]
def conversations(_state: Any) -> list[str]:
    """List the conversations that this worker owns."""
    return consumer.conversation_ids()


@control_command()  # type: ignore[untyped-decorator]
def drain(_state: Any) -> dict[str, int | str]:
    """Stop claiming conversations and give back the waiting ones."""
    try:
        return {"left": loop_thread.call(consumer.drain())}
    except CancelledError:
        return {"error": "This worker stops and hands back its work."}
