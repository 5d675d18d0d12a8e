"""What is asked of a model next: the step itself, or what a condenser wants to know before it.

Holds: a function of the state, the View and the agent, and what an answer leads to is a function of the answer: a
worker that dies in between costs one model call, and the next one asks the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.actions import CondensationAction
from broker.events import Event, LLMSpec, ModelReply
from controller_worker.agents.agent import Agent
from controller_worker.condensers.condenser import Inquiry
from controller_worker.condensers.registry import create_condenser
from controller_worker.handing_in import examined
from controller_worker.llm.llm import ModelRequest
from controller_worker.memory.conversation_memory import PromptOptions
from controller_worker.memory.recollection import Recollection
from controller_worker.model_call import Models
from controller_worker.state import State


@dataclass(frozen=True, slots=True)
class Question:
    """One request to one model.

    Attributes:
        seen_id: the last event the prompt was made from.
        inquiry: the condenser's question that this is; None for a step.
    """

    llm: LLMSpec
    request: ModelRequest
    seen_id: int
    inquiry: Inquiry | None = None

    def events_of(self, reply: ModelReply, agent: Agent, state: State) -> tuple[Event, ...]:
        """Return what an answer leads to, the reply itself first."""
        if self.inquiry is None:
            return (reply, *examined(agent.events_of(reply, state.task_list), state.agent.output))
        reply = reply.model_copy(update={"service": "condenser", "iteration": self.request.iteration})
        return (reply, self.inquiry.conclude(reply))


async def next_question(
    state: State, agent: Agent, recollection: Recollection, models: Models
) -> Question | CondensationAction:
    """Return what to ask, or a condensation for which nobody needs to be asked.

    Raises:
        CorruptEntry: an entry of the log is damaged or missing.
    """
    llm = state.agent.llm
    prompt = await recollection.prompt(
        state.version,
        create_condenser(state.agent.condenser),
        PromptOptions(
            max_message_chars=models.max_message_chars(llm),
            shows_recalls=state.agent.enable_prompt_extensions,
            disabled_skills=state.agent.disabled_microagents,
        ),
        overflows=state.overflows,
    )
    if isinstance(prompt, CondensationAction):
        return prompt
    inquiry = prompt if isinstance(prompt, Inquiry) else None
    if inquiry is not None:  # such a prompt is never sent again
        llm = (inquiry.llm or llm).model_copy(update={"caching_prompt": False})
    request = ModelRequest(
        messages=prompt.messages if isinstance(prompt, Inquiry) else prompt,
        tools=agent.tools if inquiry is None else inquiry.tools,
        conversation_id=state.conversation_id,
        iteration=state.iteration,
        workspace=state.workspace.path or "/workspace",
        service="agent" if inquiry is None else "condenser",
    )
    return Question(llm, request, state.version, inquiry)
