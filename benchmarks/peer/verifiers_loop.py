"""An environment of verifiers for `rollout_kills`: `vf-eval verifiers-loop`, with this directory on PYTHONPATH.

Its harness is a loop of `turns` + 1 calls at the rollout's endpoint, in the process of verifiers, with a tool that is
answered at once. It runs in verifiers' own environment, and imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.task import TaskData

__all__ = ["LoopHarness", "LoopHarnessConfig", "LoopTask", "LoopTaskset", "LoopTasksetConfig"]

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "execute_bash", "description": "Run it.", "parameters": PARAMETERS}}


class LoopTasksetConfig(TasksetConfig):
    """The number of tasks."""

    count: int = 8


class LoopTask(vf.Task[TaskData]):
    """A task that every rollout solves."""

    @vf.reward
    async def check(self) -> float:
        """Return the reward."""
        return 1.0


class LoopTaskset(vf.Taskset[LoopTask, LoopTasksetConfig]):
    """The tasks."""

    def load(self) -> Iterable[LoopTask]:
        """Yield the tasks."""
        for number in range(self.config.count):
            name = f"prompt-{number}"
            data = TaskData(id=name, name=name, prompt=f"Find the answer {number}.")
            yield LoopTask(data, self.config.task)


class LoopHarnessConfig(HarnessConfig):
    """The model, and the number of calls."""

    turns: int = 4


class LoopHarness(Harness[LoopHarnessConfig]):
    """Makes the calls of a rollout one after another."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002
        runtime: Any,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: TaskData,
    ) -> ProgramResult:
        """Run one rollout."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            for _ in range(self.config.turns + 1):
                body = {"model": ctx.model, "messages": messages, "tools": [TOOL]}
                answer = await client.post("chat/completions", json=body)
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "rollouts"}
                    for call in message.get("tool_calls") or ()
                ]
        return ProgramResult(0, "", "")
