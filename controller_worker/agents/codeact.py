"""CodeActAgent: acts through a shell, a file editor, thinking and finishing (OpenHands 9.1)."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import (
    GLOB,
    GREP,
    AgentFinishAction,
    AgentSpec,
    Event,
    ModelReply,
    TaskItem,
    ToolSpec,
    WorkspaceSpec,
    action_kinds,
)
from controller_worker.agents.browsing import DELEGATE_TO_BROWSING_AGENT
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.offered_names import make_visible_names
from controller_worker.agents.prompt import render_prompt
from controller_worker.agents.tool_calls import make_offered_tool, parse_reply

ORDER = (
    "execute_bash",
    "think",
    "finish",
    "delegate",
    "delegate_to_browsing_agent",
    "request_condensation",
    "browser",
    "execute_ipython_cell",
    "task_tracker",
    "note",
    "str_replace_editor",
)
"""OpenHands' order of tools, so that prompts are the same; other tools follow."""


class CodeActAgent:
    """The general agent. It offers the tool of every kind of action with `Action.is_offered`."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        offered = [kind.tool_spec for kind in action_kinds() if kind.is_offered(spec)]
        if spec.enable_search:
            offered += (GREP, GLOB)
        if spec.enable_browsing_delegate:
            offered.append(DELEGATE_TO_BROWSING_AGENT)
        offered.sort(key=lambda tool: ORDER.index(tool.name) if tool.name in ORDER else len(ORDER))
        own = [make_finish_tool(spec.output) if tool is AgentFinishAction.tool_spec else tool for tool in offered]
        names = {tool.name for tool in own}
        visible = make_visible_names(spec.tools, names)
        offers = {offer.key: make_offered_tool(offer, visible[offer.key]) for offer in spec.tools}
        self._tools = (*own, *offers.values())

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in OpenHands' order."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the system prompt."""
        return render_prompt(
            "codeact.j2",
            workspace=workspace,
            has_finish=self._spec.enable_finish,
            suffix=self._spec.system_prompt_suffix,
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        return parse_reply(reply, self._tools, task_list)
