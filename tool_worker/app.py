"""The Celery application of tool workers: `celery -A tool_worker.app worker`."""

from __future__ import annotations

from broker.celery.app import make_app
from broker.celery.bootstep import add_loop
from tool_worker.settings import tool_settings
from tool_worker.worker.consumer import ToolConsumer

settings = tool_settings()
app = make_app("tool", settings.celery_url)
consumer = ToolConsumer(settings)
loop_thread = add_loop(app, consumer)
