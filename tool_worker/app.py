"""The Celery application of tool workers: `celery -A tool_worker.app worker`.

Remote control: `inspect conversations` lists the conversations whose actions a worker is running.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from broker.celery import add_loop, make_app
from tool_worker.settings import load_tool_settings
from tool_worker.worker import ToolConsumer

settings = load_tool_settings()
app = make_app("tool", settings.variables.celery_url)
consumer = ToolConsumer(settings)
loop_thread = add_loop(app, consumer)


@inspect_command()  # type: ignore[untyped-decorator]
def conversations(_state: Any) -> list[str]:
    """List the conversations whose actions this worker is running."""
    return consumer.conversation_ids()
