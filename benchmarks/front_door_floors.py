"""What the ways in are compared with, each the least that such a program can do; `benchmarks.front_door` starts them.

python -m celery -A benchmarks.front_door_floors worker    a Celery task that does nothing
python -m benchmarks.front_door_floors --port 8000         an HTTP handler that reads its answer from the store
"""

from __future__ import annotations

import argparse
import asyncio
import os

from aiohttp import web
from celery import Celery

from broker.store.store import Store, open_store

TASK = "benchmarks.nothing"
QUEUE = "nothing"
ANSWER_KEY = "benchmark:answer"

app = Celery("nothing", broker=os.environ.get("DECKHANDS_CELERY_URL"), backend=os.environ.get("DECKHANDS_CELERY_URL"))
app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)


@app.task(name=TASK)
def nothing(task: str, **_: object) -> str:
    """Return the task, as a run returns its result."""
    return task


def make_site(store: Store) -> web.Application:
    """Return an application that answers every POST with the JSON that the store has under `ANSWER_KEY`."""

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        return web.Response(body=await store.call("GET", ANSWER_KEY), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    site = web.Application()
    site.add_routes([web.post("/runs/wait", answer), web.get("/health", health)])
    return site


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    runner = web.AppRunner(make_site(await open_store(os.environ["DECKHANDS_URL"])), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
