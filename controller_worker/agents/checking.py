"""CheckAgent: finishes at once, so that a conversation consists of the check of its goal.

Holds: it calls no model and changes nothing. The command of the goal is an action of the log like any other, so it runs
exactly once in the workspace's sandbox, even if workers die. The conversation finishes if the command exits with 0, and
ends in the error `goal_not_reached` if not.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import AgentFinishAction, Event, ModelReply, TaskItem, WorkspaceSpec
from controller_worker.agents.agent import ModelFree


class CheckAgent(ModelFree):
    """The agent that only runs the check of its goal."""

    def system_prompt(self, workspace: WorkspaceSpec) -> str:  # noqa: ARG002  (nobody reads it)
        """Return the system prompt."""
        return "This agent lets its goal be checked and asks no model."

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:  # noqa: ARG002
        """Return the finish; its check is the only action. See `Agent.events_of`."""
        return [AgentFinishAction(final_thought="The check decides.")]
