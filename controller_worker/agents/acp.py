"""AcpAgent: an agent that runs as a program with the Agent Client Protocol, in the sandbox of the workspace.

None of our models is called. Each reply is made from the agent's latest report (`model.acp_turn`): its text, and one
call that names the next action. So the log is replayed like that of any other agent.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import (
    AcpPermissionAction,
    AcpTurnAction,
    Action,
    AgentFinishAction,
    AgentRejectAction,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    TaskItem,
    TaskTrackingAction,
    ToolCallMetadata,
    WorkspaceSpec,
    parse_json,
)
from controller_worker.agents.agent import ModelFree

PLAN, TURN, PERMISSION, WAIT, REJECT = "acp_plan", "acp_turn", "acp_permission", "acp_wait", "acp_reject"
"""The call after a report; without any of these the agent has finished."""


class AcpAgent(ModelFree):
    """An agent that runs as a program in the sandbox.

    Attributes:
        is_acp: its replies are made from reports.
    """

    is_acp = True

    def system_prompt(self, workspace: WorkspaceSpec) -> str:  # noqa: ARG002  (nobody reads it)
        """Return the system prompt."""
        return "The loop of this agent is a program that speaks the Agent Client Protocol."

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """Return the events of a reply; see `Agent.events_of`."""
        events: list[Event] = []
        calls = {call.name: parse_json(call.arguments) for call in reply.tool_calls}
        if PLAN in calls:
            plan = TaskTrackingAction.model_validate({"command": "plan", "task_list": calls[PLAN]["task_list"]})
            answer = plan.answer(task_list).model_copy(
                update={"source": EventSource.AGENT, "cause": reply.id + len(events) + 1}
            )
            events += [plan, answer]
        if reply.content and (TURN in calls or PERMISSION in calls or WAIT in calls):
            events.append(
                MessageAction(content=reply.content, source=EventSource.AGENT, wait_for_response=WAIT in calls)
            )
        if TURN in calls:
            events.append(_link_call(AcpTurnAction.model_validate(calls[TURN]), reply, TURN))
        elif PERMISSION in calls:
            events.append(_link_call(AcpPermissionAction.model_validate(calls[PERMISSION]), reply, PERMISSION))
        elif REJECT in calls:
            events.append(AgentRejectAction(outputs={"reason": reply.content or calls[REJECT]["reason"]}))
        elif WAIT not in calls:
            events.append(AgentFinishAction(final_thought=reply.content))
        elif not reply.content:
            events.append(
                MessageAction(content=calls[WAIT]["reason"], source=EventSource.AGENT, wait_for_response=True)
            )
        return events


def _link_call(action: Action, reply: ModelReply, name: str) -> Action:
    call = next(call for call in reply.tool_calls if call.name == name)
    metadata = ToolCallMetadata(function_name=name, tool_call_id=call.id, reply_id=reply.id)
    return action.model_copy(update={"tool_call_metadata": metadata})
