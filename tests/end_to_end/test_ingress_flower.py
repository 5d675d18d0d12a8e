"""Flower sees agents as tasks: received, started, succeeded or failed, with arguments that are cut and masked."""

from __future__ import annotations

from typing import Any

from deckhands.ingress.context import derive_task_conversation_id
from tests.end_to_end.test_flower import LOGIN, flower_of
from tests.ingress_parts import Producer, saying
from tests.polling import until

SECRET = "correct-horse-battery"


async def test_flower_shows_agents_as_tasks(producer: Producer) -> None:
    async with flower_of(producer.cluster) as flower:

        async def tasks() -> dict[str, Any]:
            answer = await flower.get("/api/tasks", auth=LOGIN)
            found: dict[str, Any] = answer.json()
            return found

        async def listens() -> bool:
            probe = producer.send("cancel", "no-such-conversation")
            await producer.until_state(probe, "FAILURE")
            return probe.id in await tasks()

        await until(listens, limit=60.0, what="a task in Flower")
        options = {**producer.options(saying("done")), "secrets": {"KEY": SECRET}}
        done = producer.send("run", f"use {SECRET}; " + "long " * 500, kwargs=options)
        await producer.value(done)
        refused = producer.send("run")
        await producer.until_state(refused, "FAILURE")
        states = {done.id: "SUCCESS", refused.id: "FAILURE"}

        async def both_have_ended() -> bool:
            found = await tasks()
            return all(found.get(name, {}).get("state") == state for name, state in states.items())

        await until(both_have_ended, limit=60.0, what="the end of both tasks in Flower")
        shown = (await tasks())[done.id]
        assert shown["name"] == "deckhands.run"
        assert shown["received"] is not None
        assert shown["started"] is not None
        assert "use <secret_hidden>; long" in shown["args"]
        assert SECRET not in str(await tasks())
        assert max(len(shown["args"]), len(shown["kwargs"])) <= 200
        assert derive_task_conversation_id(done.id) in shown["result"]
