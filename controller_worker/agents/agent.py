"""The protocol of agents, and their prompts: templates beside the agents, filled in.

Holds: an agent is a value made from an `AgentSpec`. It keeps nothing between steps, so any worker can take the next
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Protocol

import jinja2

from broker.contract import AgentSpec, Event, ModelReply, TaskItem, ToolSpec, WorkspaceSpec


def should_show_pages(agent: Agent) -> bool:
    """Return whether an agent's model sees pictures of pages; an agent can decline them by its `sees_pages`."""
    return getattr(agent, "sees_pages", True)


def is_sdk_agent(agent: Agent) -> bool:
    """Return whether the loop of an agent is the Claude Agent SDK, as its attribute `is_sdk` says."""
    return getattr(agent, "is_sdk", False)


def is_acp_agent(agent: Agent) -> bool:
    """Return whether the loop of an agent is a program in the sandbox, as its attribute `is_acp` says."""
    return getattr(agent, "is_acp", False)


class ModelFree:
    """The base of agents that decide without one of our models."""

    asks_model = False

    def __init__(self, spec: AgentSpec) -> None:
        """Take a specification. It is ignored: the goal and the replies define the work."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """No tools, because no model would call them."""
        return ()


class Agent(Protocol):
    """An agent: its prompt, its tools, and the translation of its model's replies.

    An agent without a model sets its attribute `asks_model` to False.
    """

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in order."""
        ...

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the system prompt."""
        ...

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """Return the events of a reply, in order.

        Args:
            reply: with its event id; the returned events get the ids that follow it.
            task_list: the latest task list in the log.

        Returns:
            Actions, and observations that need no tool worker, each with `cause` and tool call metadata set. Never
            empty.
        """
        ...


def render_prompt(name: str, **values: Any) -> str:
    """Return the prompt of a template; every value that it names is required."""
    return _load_template(name).render(values)


@cache
def _load_template(name: str) -> jinja2.Template:
    text = resources.files("controller_worker.agents").joinpath("prompts", name).read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined).from_string(text)  # noqa: S701  (a prompt is not HTML)
