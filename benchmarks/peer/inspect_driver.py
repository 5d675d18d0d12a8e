"""The work of `eval_crowd` in inspect_ai, under its own interpreter: `python inspect_driver.py COUNT LOGS`.

STUB_BASE_URL names the server. Its settings are the best that it has for this: as many connections and samples at once
as there are samples, no display, no sandbox, no record of model calls. Prints a JSON object: seconds, cpu, peak_kib,
steps, right.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import execute_tools, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import solver
from inspect_ai.tool import tool

COUNT, LOGS = int(sys.argv[1]), sys.argv[2]
STEPS = 0


@tool
def execute_bash() -> Any:
    async def execute(command: str) -> str:
        """Run a command.

        Args:
            command: what to run.
        """
        return command[:0]

    return execute


@tool
def finish() -> Any:
    async def execute(message: str) -> str:
        """Finish.

        Args:
            message: what to say.
        """
        return message

    return execute


@solver
def loop() -> Any:
    async def solve(state: Any, generate: Any) -> Any:  # noqa: ARG001  (inspect's signature)
        global STEPS  # noqa: PLW0603
        tools = [execute_bash(), finish()]
        while True:
            state.output = await get_model().generate(state.messages, tools=tools)
            STEPS += 1
            state.messages.append(state.output.message)
            calls = state.output.message.tool_calls or []
            ended = [call for call in calls if call.function == "finish"]
            if ended or not calls:
                state.output.completion = str(ended[0].arguments.get("message", "")) if ended else ""
                return state
            state.messages.extend((await execute_tools(state.messages, tools))[0])

    return solve


def main() -> None:
    """Run once."""
    task = Task(
        dataset=[Sample(input="What is 2 * 3?", target="6", id=f"i{number}") for number in range(COUNT)],
        solver=loop(),
        scorer=includes(),
    )
    cpu, began = time.process_time(), time.monotonic()
    (log,) = evaluate(
        task,
        model="openai-api/stub/scripted",
        max_connections=COUNT,
        max_samples=COUNT,
        display="none",
        log_dir=LOGS,
        log_samples=True,
        log_model_api=False,
        fail_on_error=False,
    )
    found = {
        "version": inspect_ai.__version__,
        "status": log.status,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "steps": STEPS,
        "right": sum(str(sample.scores["includes"].value) in ("C", "1") for sample in log.samples or []),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
