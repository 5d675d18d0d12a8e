"""DummyAgent: takes the same few steps for every task, without a model; for tests and demonstrations (9.6).

Holds: step N is always the same, so every conversation of this agent has the same log, except for its times.
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
