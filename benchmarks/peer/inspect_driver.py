"""The work of `eval_crowd` and `eval_kills` in inspect_ai, under its own interpreter:
`python inspect_driver.py COUNT LOGS [AT_ONCE]`.

STUB_BASE_URL names the server. Its settings are the best that it has for this: as many connections at once as samples,
no display, no sandbox, no record of model calls. With AT_ONCE it is an eval set that writes each sample to its log as
soon as it has ended, and the same command again completes what was interrupted. Prints a JSON object: seconds, cpu,
peak_kib, steps, samples, right.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import inspect_ai
from inspect_ai import Task, eval_set, task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import execute_tools, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import solver
from inspect_ai.tool import tool

COUNT, LOGS = int(sys.argv[1]), sys.argv[2]
AT_ONCE = int(sys.argv[3]) if len(sys.argv) > 3 else 0
MODEL = "openai-api/stub/scripted"
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
            ended = [call for call in calls if call.call_function == "finish"]
            if ended or not calls:
                state.output.completion = str(ended[0].arguments.get("message", "")) if ended else ""
                return state
            state.messages.extend((await execute_tools(state.messages, tools))[0])

    return solve


@task
def crowd() -> Task:
    """The samples; with AT_ONCE every other one is wrong, as in `eval_kills`."""
    return Task(
        dataset=[
            Sample(
                input=f"What is 2 * 3? (latency-key=i{number})",
                target="7" if AT_ONCE and number % 2 == 0 else "6",
                id=f"i{number}",
            )
            for number in range(COUNT)
        ],
        solver=loop(),
        scorer=includes(),
    )


def run() -> Any:
    """Evaluate, and return the log."""
    same: dict[str, Any] = {"model": MODEL, "display": "none", "log_dir": LOGS, "log_model_api": False}
    if not AT_ONCE:
        (log,) = evaluate(crowd(), max_connections=COUNT, max_samples=COUNT, fail_on_error=False, **same)
        return log
    _, logs = eval_set(crowd(), max_connections=AT_ONCE, max_samples=AT_ONCE, log_buffer=1, **same)
    return read_eval_log(logs[-1].locate)


def main() -> None:
    """Run once."""
    cpu, began = time.process_time(), time.monotonic()
    log = run()
    samples = log.samples or []
    found = {
        "version": inspect_ai.__version__,
        "status": log.status,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "steps": STEPS,
        "samples": len({sample.id for sample in samples if not sample.error}),
        "right": sum(str(sample.scores["includes"].value) in ("C", "1") for sample in samples if sample.scores),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
