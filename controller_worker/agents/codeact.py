"""CodeActAgent: acts through a shell, a file editor, thinking and finishing (OpenHands 9.1)."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract.actions import TaskItem
from broker.contract.events import AgentSpec, Event, ModelReply, WorkspaceSpec
from broker.contract.specs import handles_requests
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents import tool_schemas
from controller_worker.agents.finish_tool import finish_tool
from controller_worker.agents.note_tool import NOTE
from controller_worker.agents.prompt import rendered
from controller_worker.agents.task_list import TASK_TRACKER
from controller_worker.agents.tool_calls import events_of_reply


class CodeActAgent:
    """The general agent."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        can_condense = spec.enable_condensation_request and handles_requests(spec.condenser)
        offered = (
            (spec.enable_cmd, tool_schemas.EXECUTE_BASH),
            (spec.enable_think, tool_schemas.THINK),
            (spec.enable_finish, finish_tool(spec.output)),
            (spec.enable_delegation, tool_schemas.DELEGATE),
            (spec.enable_browsing_delegate, tool_schemas.DELEGATE_TO_BROWSING_AGENT),
            (can_condense, tool_schemas.REQUEST_CONDENSATION),
            (spec.enable_browsing, tool_schemas.BROWSER),
            (spec.enable_jupyter, tool_schemas.EXECUTE_IPYTHON_CELL),
            (spec.enable_plan_mode, TASK_TRACKER),
            (spec.memory is not None, NOTE),
            (spec.enable_editor, tool_schemas.STR_REPLACE_EDITOR),
        )
        own = tuple(tool for is_enabled, tool in offered if is_enabled)
        self._tool_names = frozenset(tool.name for tool in own)
        self._offers = {offer.name: offer for offer in spec.tools if offer.name not in self._tool_names}
        self._tools = (*own, *(offer.spec for offer in self._offers.values()))

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in OpenHands' order."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the text a conversation begins with."""
        return rendered(
            "codeact.j2",
            workspace=workspace,
            has_finish=self._spec.enable_finish,
            suffix=self._spec.system_prompt_suffix,
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        return events_of_reply(
            reply,
            self._tool_names,
            self._offers,
            task_list=task_list,
            hands_in=self._spec.output is not None,
        )
