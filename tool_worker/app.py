"""The Celery application of tool workers: `celery -A tool_worker.app worker`."""

from __future__ import annotations

from broker.bootstep import add_loop
from broker.celery_app import make_app
from tool_worker.consumer import ToolConsumer
from tool_worker.settings import tool_settings

settings = tool_settings()
app = make_app("tool", settings.celery_url)
consumer = ToolConsumer(settings)
loop_thread = add_loop(app, consumer)
