"""The protocol of agents.

Holds: an agent is a value made from an `AgentSpec`; it keeps nothing between steps, so any worker can take the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from broker.contract import AgentSpec, Event, ModelReply, TaskItem, ToolSpec, WorkspaceSpec


def sees_pages(agent: Agent) -> bool:
    """Say whether pictures of pages are shown to an agent's model; an agent may say no by its `sees_pages`."""
    return getattr(agent, "sees_pages", True)


def is_sdk_agent(agent: Agent) -> bool:
    """Say whether the loop of an agent is the Claude Agent SDK; an agent says so by its `is_sdk`."""
    return getattr(agent, "is_sdk", False)


def is_acp_agent(agent: Agent) -> bool:
    """Say whether the loop of an agent is a program in the sandbox; an agent says so by its `is_acp`."""
    return getattr(agent, "is_acp", False)


class ModelFree:
    """What agents have in common that decide without a model of ours."""

    asks_model = False

    def __init__(self, spec: AgentSpec) -> None:
        """Take a specification; the goal and the replies say what there is to do."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """No tools: nobody would call them."""
        return ()


class Agent(Protocol):
    """What decides, besides the model.

    An agent that decides without a model says so by an attribute `asks_model` that is false.
    """

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in order."""
        ...

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the text a conversation begins with."""
        ...

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """Return what a reply leads to, in order.

        Args:
            reply: with its event id; the events returned get the ids that follow it.
            task_list: as the latest plan in the log has it.

        Returns:
            Actions and those observations that need no tool worker, each with `cause` and tool call metadata set.
            Never empty.
        """
        ...
