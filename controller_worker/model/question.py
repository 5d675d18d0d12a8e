"""The next request to a model: a step, or a question of a condenser or a critic.

Holds: a question is a function of the state, the View and the agent; its result is a function of the answer. A worker
crash in between costs one model call, and the next owner asks the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from broker.contract import CondensationAction, Event, LLMSpec, ModelReply, ToolSpec
from controller_worker.agents import Agent, is_acp_agent, parse_finish, should_show_pages, to_turn_events
from controller_worker.core import State, check_outputs, needs_verdict
from controller_worker.memory import Inquiry, PromptOptions, create_condenser
from controller_worker.model import acp_turn, critic
from controller_worker.model.models import Models
from controller_worker.model.prompt_history import PromptHistory
from controller_worker.providers import SILENT_MODEL, Message, ModelRequest


@dataclass(frozen=True, slots=True)
class Question:
    """One request to one model.

    Attributes:
        seen_id: the last event in the prompt.
        conclude: converts the answer to events for the condenser or the critic; None for a step.
    """

    llm: LLMSpec
    request: ModelRequest
    seen_id: int
    conclude: Callable[[ModelReply], Event] | None = None

    def events_of(self, reply: ModelReply, agent: Agent, state: State) -> tuple[Event, ...]:
        """Return the events of an answer. The reply comes first."""
        if self.conclude is None:
            output = state.setup.agent.output
            if (
                output is not None
                and self.request.output_schema is not None
                and parse_finish(reply, output) is not None
            ):
                reply = reply.model_copy(update={"is_output": True})
            return (reply, *check_outputs(to_turn_events(agent, reply, state.tasks.items, output), output))
        reply = reply.model_copy(update={"service": self.request.service, "iteration": self.request.iteration})
        return (reply, self.conclude(reply))


async def next_question(
    state: State, agent: Agent, recollection: PromptHistory, models: Models
) -> Question | CondensationAction:
    """Return the next question, or a condensation that needs no model call.

    Raises:
        CorruptEntry: an entry of the log is damaged or missing.
        ModelNotOffered, LLMConfigError: the conversation may not use the model that it names.
    """
    question = await _choose_question(state, agent, recollection, models)
    if not isinstance(question, Question):
        return question
    llm = await models.route(question.llm, question.request, get_tenant(state))
    return question if llm is question.llm else replace(question, llm=llm)


def get_tenant(state: State) -> str:
    """Return the tenant of a conversation; empty if it has none."""
    return state.setup.tenancy.tenant


async def _choose_question(
    state: State, agent: Agent, recollection: PromptHistory, models: Models
) -> Question | CondensationAction:
    if needs_verdict(state):
        return await _make_critic_question(state, recollection, models)
    if is_acp_agent(agent):
        return await _make_acp_question(state, recollection)
    is_asking = getattr(agent, "asks_model", True)
    tenant = get_tenant(state)
    llm = models.choose(state.setup.agent.llm, tenant) if is_asking else LLMSpec(model=SILENT_MODEL)
    prompt = await recollection.build_prompt(
        state.version,
        create_condenser(state.setup.agent.condenser),
        PromptOptions(
            max_message_chars=models.max_message_chars(llm),
            sees_images=models.sees_images(llm),
            shows_pages=state.setup.agent.enable_som_visual_browsing and should_show_pages(agent),
            shows_recalls=state.setup.agent.enable_prompt_extensions,
            disabled_skills=state.setup.agent.disabled_microagents,
        ),
        overflows=state.calls.overflows,
    )
    if isinstance(prompt, CondensationAction):
        return prompt
    if isinstance(prompt, Inquiry):
        request = _make_request(state, prompt.messages, prompt.tools, "condenser")
        other = models.choose(prompt.llm, tenant) if prompt.llm is not None else llm
        return Question(_without_prompt_cache(other), request, state.version, prompt.conclude)
    request = _make_request(state, prompt, agent.tools, "agent")
    output = state.setup.agent.output
    if output is not None and models.structures_output(llm):
        request = replace(request, output_schema=output.json_schema)
    if state.setup.rollout:
        request = replace(request, rollout=await recollection.load_tokens(state.version))
    return Question(llm, request, state.version)


async def _make_acp_question(state: State, recollection: PromptHistory) -> Question:
    spec = state.setup.agent.acp
    assert spec is not None
    events = (await recollection.build_view(state.version)).events
    outcome = acp_turn.read_progress(events).outcome
    later = await recollection.list_after(outcome.id, state.version) if outcome is not None else ()
    request = _make_request(state, (Message("user"),), (), "agent")
    request = replace(request, answer=acp_turn.decide_reply(spec, events, later))
    return Question(LLMSpec(model=SILENT_MODEL), request, state.version)


async def _make_critic_question(state: State, recollection: PromptHistory, models: Models) -> Question:
    goal = state.setup.agent.goal
    assert goal is not None
    assert goal.critic is not None
    events = (await recollection.build_view(state.version)).events
    messages = critic.render_prompt(goal.critic, events, overflows=state.calls.overflows)
    return Question(
        _without_prompt_cache(models.choose(goal.critic.llm or state.setup.agent.llm, get_tenant(state))),
        _make_request(state, messages, (critic.VERDICT,), "critic"),
        state.version,
        partial(critic.parse_verdict, finish_id=state.lifecycle.result_id),
    )


def _without_prompt_cache(llm: LLMSpec) -> LLMSpec:
    """Return the model without prompt caching, for a prompt that is sent only once."""
    return llm.model_copy(update={"caching_prompt": False})


def _make_request(
    state: State,
    messages: tuple[Message, ...],
    tools: Sequence[ToolSpec],
    service: Literal["agent", "condenser", "critic"],
) -> ModelRequest:
    return ModelRequest(
        messages=messages,
        tools=tools,
        conversation_id=state.setup.conversation_id,
        iteration=state.usage.iteration,
        workspace=state.setup.workspace.path or "/workspace",
        service=service,
    )
