"""ChaosAgent: runs commands whose effects can be counted, without a model; the workload of `deckhands chaos`.

Holds: step N is always the same. Each command appends its number to a file when it starts and when it ends, so the file
shows how often the command ran, and whether it ran to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import (
    AgentFinishAction,
    CmdRunAction,
    Event,
    ModelReply,
    TaskItem,
    WorkspaceSpec,
    make_counted_command,
)
from controller_worker.agents.agent import ModelFree

COMMANDS = 6


class ChaosAgent(ModelFree):
    """The agent of `deckhands chaos`."""

    def system_prompt(self, workspace: WorkspaceSpec) -> str:  # noqa: ARG002  (nobody reads it)
        """Return the system prompt."""
        return "This agent runs commands whose effects are counted and asks no model."

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:  # noqa: ARG002
        """Return the step with the reply's number. See `Agent.events_of`."""
        if reply.iteration > COMMANDS:
            return [AgentFinishAction(final_thought="All commands have run.")]
        return [CmdRunAction(command=make_counted_command(reply.iteration))]
