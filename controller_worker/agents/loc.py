"""LocAgent: finds the code that a task is about, and changes nothing (OpenHands 9.3)."""

from __future__ import annotations

from collections.abc import Sequence

from broker.actions import TaskItem
from broker.events import AgentSpec, Event, ModelReply, WorkspaceSpec
from broker.tool_specs import ToolSpec
from controller_worker.agents.locating import EXPLORE_TREE_STRUCTURE, GET_ENTITY_CONTENTS, SEARCH_CODE_SNIPPETS
from controller_worker.agents.prompt import rendered
from controller_worker.agents.tool_calls import events_of_reply
from controller_worker.agents.tool_schemas import FINISH
from controller_worker.handing_in import finish_tool


class LocAgent:
    """The agent that locates. It is given no other tools, whatever it was offered: they might change something."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        own_finish = finish_tool(FINISH, spec.output)
        self._tools = (own_finish, SEARCH_CODE_SNIPPETS, GET_ENTITY_CONTENTS, EXPLORE_TREE_STRUCTURE)
        self._tool_names = frozenset(tool.name for tool in self._tools)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in OpenHands' order."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the text a conversation begins with."""
        return rendered("loc.j2", workspace=workspace, suffix=self._spec.system_prompt_suffix)

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        return events_of_reply(reply, self._tool_names, task_list=task_list, hands_in=self._spec.output is not None)
