"""A task of inspect whose solver is an agent of Deckhands: `inspect eval examples/inspect_task.py`."""

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes

from deckhands.interop.bridges.inspect_solver import deckhands_agent


@task
def questions():
    return Task(
        dataset=json_dataset("questions.jsonl"),
        solver=deckhands_agent("CodeActAgent", model="anthropic/claude-sonnet-4-5"),
        scorer=includes(),
    )
