"""Agents that call no model.

DummyAgent: takes the same few steps for every task; for tests and demonstrations (9.6).

CheckAgent: finishes at once, so that a conversation consists of the check of its goal.

ChaosAgent: runs commands whose effects can be counted, without a model; the workload of `deckhands chaos`.

Holds: step N is always the same, so every conversation of this agent has the same log, except for its times. CheckAgent
changes nothing. The command of the goal is an action of the log like any other, so it runs exactly once in the
workspace's sandbox, even if workers die. The conversation finishes if the command exits with 0, and ends in the error
`goal_not_reached` if not. Each command of ChaosAgent appends its number to a file when it starts and when it ends, so
the file shows how often the command ran, and whether it ran to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import (
    Action,
    AgentFinishAction,
    AgentRejectAction,
    CmdRunAction,
    Event,
    EventSource,
    FileReadAction,
    FileWriteAction,
    MessageAction,
    ModelReply,
    TaskItem,
    WorkspaceSpec,
    make_counted_command,
)
from controller_worker.agents.agent import ModelFree

STEPS: Sequence[Action] = (
    MessageAction(content="I begin.", source=EventSource.AGENT),
    CmdRunAction(command="echo foo"),
    FileWriteAction(path="hello.sh", content='echo "Hello, World!"'),
    FileReadAction(path="hello.sh"),
    CmdRunAction(command="bash hello.sh"),
    AgentRejectAction(outputs={"reason": "I can do no more than this."}),
    AgentFinishAction(final_thought="There is nothing left to do."),
)
"""The steps in order; the last one is repeated."""


class DummyAgent(ModelFree):
    """The agent with a fixed list of steps."""

    def system_prompt(self, workspace: WorkspaceSpec) -> str:  # noqa: ARG002  (nobody reads it)
        """Return the system prompt."""
        return "This agent follows a fixed list and asks no model."

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:  # noqa: ARG002
        """Return the step with the reply's number. See `Agent.events_of`."""
        return [STEPS[min(reply.iteration, len(STEPS)) - 1]]


class CheckAgent(ModelFree):
    """The agent that only runs the check of its goal."""

    def system_prompt(self, workspace: WorkspaceSpec) -> str:  # noqa: ARG002  (nobody reads it)
        """Return the system prompt."""
        return "This agent lets its goal be checked and asks no model."

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:  # noqa: ARG002
        """Return the finish; its check is the only action. See `Agent.events_of`."""
        return [AgentFinishAction(final_thought="The check decides.")]


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
