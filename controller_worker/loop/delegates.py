"""The delegates of a conversation, which are conversations too: start, pause and stop them with it, report their ends.

Holds: every operation can be repeated after a crash and is written once: a delegate's id is derived from its parent's
id and the action's, and every append to another log has its own key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

from broker.contract import (
    NO_SKILLS,
    TERMINAL_STATES,
    AgentDelegateAction,
    AgentFile,
    AgentFinishAction,
    AgentRejectAction,
    AgentSpec,
    AgentState,
    ChangeAgentStateAction,
    ConversationCreated,
    DelegateEnded,
    DelegatesObservation,
    ErrorObservation,
    Event,
    EventSource,
    Limits,
    ManageDelegatesAction,
    MessageAction,
    Observation,
    Parent,
    SuccessObservation,
    checksum_of,
    render_error,
)
from broker.coordination import StoredFiles
from broker.log import Appended, Closed, Conversations, Duplicate, EventLog, find_latest_event, record_gap
from broker.runtime import (
    ConversationMoved,
    EventsLost,
    UnknownConversation,
    UsageError,
    failpoint,
    format_count,
    make_delegate_id,
)
from broker.store import Store
from controller_worker.agents import check_agent, create_agent, list_agents
from controller_worker.core import (
    NOT_STARTED,
    STARTED,
    Delegate,
    NotifyDelegates,
    State,
    count_steps,
    has_room,
    parse_survey_skills_in_turns,
    to_answer,
)
from controller_worker.loop.answers import read_event
from controller_worker.model import Models, sum_usage_by_model

T = TypeVar("T")

TASK = "TASK: {task}"
TIME_SHARE = 0.9
"""Share of the parent's remaining time: it passes for both, and the parent needs some for the result."""
AT_ONCE = 16
"""Delegates of one conversation that are started or notified at the same time."""
FIRST_MESSAGE = 2
"""The event in a delegate's log that contains its task."""
_STATES = {"pause": AgentState.PAUSED, "resume": AgentState.RUNNING, "stop": AgentState.STOPPED}
_DONE = {"message": "Sent to", "pause": "Paused", "resume": "Resumed", "stop": "Told to stop"}
_NOT_DONE = {"ended": "Already ended: {}. You will get the result.", "paused": "Paused: {}. Resume them first."}
_Outcome = Literal["done", "ended", "paused"]
WAITS_FOR_USER = frozenset({AgentState.AWAITING_USER_INPUT, AgentState.AWAITING_USER_CONFIRMATION})


class Delegates:
    """The delegates of one conversation.

    Args:
        models: the models that the operator offers.
    """

    def __init__(self, log: EventLog, store: Store, models: Models) -> None:
        self._log = log
        self._models = models
        self._conversations = Conversations(store)
        self._stored_files = StoredFiles(store)
        self._clock = store.clock

    async def start(self, state: State, delegates: Sequence[Delegate]) -> list[Observation | None]:
        """Ensure that delegates exist.

        Return for each the immediate answer to its action, or None if the step waits for its end.

        Idempotent.
        """
        return await _for_each(delegates, partial(self._start, state))

    async def _start(self, state: State, delegate: Delegate) -> Observation | None:
        try:
            await self._create(state, delegate)
        except UsageError as error:
            return to_answer(delegate, ErrorObservation(content=str(error), error_id=NOT_STARTED))
        failpoint("controller.delegate_begun")
        if not delegate.is_background:
            return None
        return to_answer(delegate, SuccessObservation(content=STARTED.format(agent=delegate.agent, id=delegate.id)))

    async def restart(self, state: State, delegate_ids: Collection[int]) -> None:
        """Ensure that background delegates exist; report an unknown agent as the end of its delegate.

        Idempotent.
        """
        due = set(delegate_ids)
        delegates = [delegate for delegate in state.delegation.delegates if delegate.id in due]
        await _for_each(delegates, partial(self._restart, state))

    async def _restart(self, state: State, delegate: Delegate) -> None:
        delegate_id = make_delegate_id(state.setup.conversation_id, delegate.id)
        if await self._conversations.load_rows([delegate_id]):
            return
        try:
            await self._create(state, delegate)
        except UsageError as error:  # an agent that is known where the fork was made
            parent = Parent(conversation_id=state.setup.conversation_id, delegate_id=delegate.id)
            ended = DelegateEnded(
                delegate_id=delegate.id,
                conversation_id=make_delegate_id(state.setup.conversation_id, delegate.id),
                agent_state=AgentState.ERROR,
                content=f"{delegate.agent} was not started. {error}",
            )
            await _append_once(self._log, parent, ended)

    async def notify(self, state: State, order: NotifyDelegates) -> None:
        """Ask the delegates to pause, resume or stop with their parent. Idempotent."""
        concerned = [
            delegate
            for delegate in state.delegation.delegates
            if delegate.end is None and not delegate.refusal and order.since <= delegate.id < order.order_id
            # What its agent has paused stays paused when a user resumes the agent.
            if not (delegate.is_paused and order.state is AgentState.RUNNING)
        ]
        await _for_each(concerned, partial(self._notify, state, order))

    async def _notify(self, state: State, order: NotifyDelegates, delegate: Delegate) -> None:
        parent_id = state.setup.conversation_id
        request = ChangeAgentStateAction(agent_state=order.state, source=EventSource.ENVIRONMENT)
        with contextlib.suppress(UnknownConversation):  # the delegate was never started
            delegate_id = make_delegate_id(parent_id, delegate.id)
            if not order.takes_back or await self._is_paused_by_parent(delegate_id):
                await self._log.append(delegate_id, [request], key=f"order:{parent_id}:{order.order_id}:{order.state}")

    async def _is_paused_by_parent(self, delegate_id: str) -> bool:
        """Return whether the last request to a delegate is its parent's request to pause."""
        last = await find_latest_event(self._log.store, delegate_id, ChangeAgentStateAction)
        asked = (last.agent_state, last.source) if last is not None else None
        return asked == (AgentState.PAUSED, EventSource.ENVIRONMENT)

    async def manage(self, state: State, action: ManageDelegatesAction) -> DelegatesObservation:
        """Carry out an action of the agent on its delegates in the background. Idempotent."""
        known = {delegate.id: delegate for delegate in state.delegation.delegates if not delegate.is_forgotten}
        running = [delegate for delegate in known.values() if delegate.is_in_background]
        unknown = [number for number in action.numbers if number not in known]
        chosen = [known[number] for number in action.numbers if number in known] or ([] if action.numbers else running)
        said: list[str] = []
        numbers: tuple[int, ...] = ()
        match action.operation:
            case "list":
                said = await _for_each(chosen, partial(self._describe, state.setup.conversation_id))
                said = said or ["No delegate works in the background."]
            case "wait":
                numbers = tuple(one.id for one in chosen if one.is_in_background and not one.is_paused)
                joined = "any" if action.join == "any" else "all"
                said = [
                    f"Waited for {joined} of: {_list(numbers)}." if numbers else "There is no delegate to wait for."
                ]
            case _ if state.lifecycle.agent_state in TERMINAL_STATES:
                said = ["This was not done: your own work was ended."]
            case "resume" if not has_room(state):
                said = ["They cannot be resumed: you have used what was reserved for them. Stop them instead."]
            case _:
                by_outcome: dict[_Outcome, list[int]] = {"done": [], "ended": [], "paused": []}
                outcomes = await _for_each(chosen, partial(self._control, state, action))
                for delegate, outcome in zip(chosen, outcomes, strict=True):
                    by_outcome[outcome].append(delegate.id)
                numbers = tuple(by_outcome["done"])
                texts = {"done": f"{_DONE[action.operation]}: {{}}.", **_NOT_DONE}
                said = [texts[outcome].format(_list(found)) for outcome, found in by_outcome.items() if found]
        if unknown:
            names = ", ".join(f"{one.id} ({one.agent})" for one in running) or "none"
            said.append(f"There is no delegate {_list(unknown)}. Those that work in the background: {names}.")
        return DelegatesObservation(content="\n".join(said), numbers=numbers)

    async def _describe(self, parent_id: str, delegate: Delegate) -> str:
        """Return a line about a delegate for its parent's agent."""
        try:
            row = await self._conversations.load_row(make_delegate_id(parent_id, delegate.id))
        except UnknownConversation:
            return f"{delegate.id} {delegate.agent}: not started yet"
        state = AgentState.PAUSED if delegate.is_paused else row.state or AgentState.LOADING
        steps = format_count(row.iterations, "step")
        return f"{delegate.id} {delegate.agent}: {state}, {steps}, ${row.cost_usd:.4f}. {row.title}"

    async def _control(self, state: State, action: ManageDelegatesAction, delegate: Delegate) -> _Outcome:
        """Append a message or an order to a delegate's log, unless it has ended.

        A later event would start an ended delegate again, although its share of the limits is released. A message would
        do the same to a paused one.
        """
        parent_id = state.setup.conversation_id
        if not delegate.is_in_background or delegate.is_stopping:
            return "ended"
        event: Event
        if action.operation == "message":
            if delegate.is_paused:
                return "paused"
            event = MessageAction(content=action.text, source=EventSource.USER)
        else:
            event = ChangeAgentStateAction(agent_state=_STATES[action.operation], source=EventSource.ENVIRONMENT)
        delegate_id = make_delegate_id(parent_id, delegate.id)
        ends = TERMINAL_STATES | (WAITS_FOR_USER if state.setup.headless else frozenset())
        if _has_deadline(state, delegate):
            ends -= {AgentState.AWAITING_USER_CONFIRMATION}
        while True:
            try:
                row = await self._conversations.load_row(delegate_id)
                if row.state in ends:
                    return "ended"
                key = f"manage:{parent_id}:{action.id}"
                outcome = await self._log.append(delegate_id, [event], key=key, seen_id=row.last_event_id)
            except ConversationMoved:
                continue  # it works meanwhile
            except UnknownConversation:
                return "ended"
            return "ended" if isinstance(outcome, Closed) else "done"

    async def _create(self, state: State, delegate: Delegate) -> None:
        action = await read_event(self._log, state.setup.conversation_id, delegate.id)
        assert isinstance(action, AgentDelegateAction)
        limits = _compute_limits(state, delegate, self._clock.now())
        defined = await self._find_defined(state, action.agent)
        if action.agent in defined:
            file = defined[action.agent]
            agent = file.make_spec(state.setup.agent, model=self._choose_model(file, state.setup.tenancy.tenant))
            limits = file.limit(limits)
        else:
            agent = make_delegate_spec(state.setup.agent, action.agent)
            if action.agent not in state.setup.agent.delegates:
                check_agent(action.agent, besides=(*state.setup.agent.delegates, *defined))
        create_agent(agent)
        conversation_id = make_delegate_id(state.setup.conversation_id, delegate.id)
        task = TASK.format(task=action.inputs["task"])
        created = ConversationCreated(
            conversation_id=conversation_id,
            source=EventSource.AGENT,
            agent=agent,
            workspace=state.setup.workspace,
            limits=limits,
            headless=state.setup.headless,
            title=task[:80].partition("\n")[0],
            tenancy=state.setup.tenancy,
            pinned_version=state.setup.pinned_version or None,
            rollout=state.setup.rollout or None,
            acks=await self._log.load_acks(state.setup.conversation_id),
            traceparent=action.traceparent,
            parent=Parent(
                conversation_id=state.setup.conversation_id,
                delegate_id=delegate.id,
                level=state.setup.delegate_level + 1,
            ),
        )
        first: list[Event] = [MessageAction(content=task, source=EventSource.USER)]
        if delegate.is_paused or delegate.is_stopping:  # a fork inherits it
            asked = AgentState.STOPPED if delegate.is_stopping else AgentState.PAUSED
            first.append(ChangeAgentStateAction(agent_state=asked, source=EventSource.ENVIRONMENT))
        # A directory name is only valid on the node of the parent.
        node = (
            (await self._conversations.load_row(state.setup.conversation_id)).node if state.setup.workspace.path else ""
        )

        async def create(shards: int) -> Appended | Duplicate:
            await self._stored_files.copy_to(state.setup.conversation_id, conversation_id, state.setup.workspace.source)
            if self._log.secrets is not None:  # before its first event, so that they are masked in it
                await self._log.secrets.lend(state.setup.conversation_id, conversation_id)
            key = f"delegate:{delegate.id}"
            return await self._log.create(created, first, key=key, node=node, shards=shards)

        outcome = await self._log.store.repeat_if_raised(conversation_id, create)
        if isinstance(outcome, Duplicate) and not await _has_task(self._log, conversation_id, task):
            raise UsageError(
                f"The name {conversation_id} belongs to a delegate with another task: "
                "the store has lost the events that created it.",
                remedy="Delegate this task again.",
            )

    async def _find_defined(self, state: State, name: str) -> dict[str, AgentFile]:
        """Return the agents that files of the workspace define; none if the delegate is known without them."""
        setup = state.setup
        taken = {*setup.agent.delegates, *list_agents()}
        if name in taken or not setup.agent.enable_delegation or not state.survey.answer_id:
            return {}
        survey = await read_event(self._log, setup.conversation_id, state.survey.answer_id)
        files = await parse_survey_skills_in_turns(survey) if isinstance(survey, Observation) else NO_SKILLS
        return {agent.name: agent for agent in files.agents.values() if agent.name not in taken}

    def _choose_model(self, file: AgentFile, tenant: str) -> str | None:
        """Return the model of a file if an entry of the operator's table offers it; None for the parent's.

        A model that an open table offers without an entry does not count: that offer is for users, not for files of a
        repository.
        """
        entries = self._models.table.entries
        is_offered = any(entry.is_for(tenant) and entry.matches(file.model) for entry in entries)
        return file.model if file.model and is_offered else None


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _has_deadline(state: State, delegate: Delegate) -> bool:
    """Return whether the questions of a delegate have a deadline, after which it continues."""
    spec = state.setup.agent.delegates.get(delegate.agent)
    policies = (state.setup.agent.confirmation, *([spec.confirmation] if spec is not None else []))
    return any(policy.deadline_seconds is not None for policy in policies)


async def _for_each(delegates: Sequence[Delegate], work: Callable[[Delegate], Awaitable[T]]) -> list[T]:
    """Call a function for each delegate, a few at the same time, and return the results in order.

    Raises:
        Exception: the first one raised, after all calls have ended.
    """
    results: list[T] = []
    for at in range(0, len(delegates), AT_ONCE):
        outcomes = await asyncio.gather(*map(work, delegates[at : at + AT_ONCE]), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
    return results


async def report_end(log: EventLog, state: State) -> None:
    """Report the end of a conversation to its parent, if it is a delegate and has ended. Idempotent."""
    if state.setup.parent is not None and is_over(state):
        failpoint("controller.before_report")
        await report(log, state, state.setup.parent)
        failpoint("controller.after_report")


async def report(log: EventLog, state: State, parent: Parent) -> None:
    """Report to a parent how its delegate has ended. Idempotent: only the first report counts."""
    try:
        request = await _find_request(log, state, parent)
    except EventsLost as lost:
        await record_gap(log, lost, noticed_by=f"the delegate {state.setup.conversation_id}")
        return
    content, outputs = await _make_result(log, state)
    models = sum_usage_by_model(await log.read(state.setup.conversation_id, until=state.version))
    ended = DelegateEnded(
        delegate_id=parent.delegate_id,
        conversation_id=state.setup.conversation_id,
        agent_state=state.lifecycle.agent_state,
        content=content,
        outputs=outputs,
        iterations=count_steps(state),
        cost_usd=state.usage.cost_usd,
        has_unknown_cost=state.usage.has_unknown_cost,
        prompt_tokens=state.usage.prompt_tokens,
        completion_tokens=state.usage.completion_tokens,
        models=models,
    )
    try:
        await _append_once(log, parent, ended, request)
    except EventsLost as lost:  # the store has restarted meanwhile
        await record_gap(log, lost, noticed_by=f"the delegate {state.setup.conversation_id}")


async def _find_request(log: EventLog, state: State, parent: Parent) -> str:
    """Return the checksum of the parent's action that asked for this delegate; empty if the parent is gone.

    Raises:
        EventsLost: the parent's log has lost it. Another action may have its number by now and must not get this
            delegate's result.
    """
    try:
        last_id = await log.load_last_id(parent.conversation_id)
        if parent.delegate_id <= last_id:
            entry = await log.load_entry(parent.conversation_id, parent.delegate_id)
            asked = await log.decode_entry(parent.conversation_id, entry, parent.delegate_id)
            asked = await log.blobs.restore_event(parent.conversation_id, asked)
            task = TASK.format(task=asked.inputs.get("task")) if isinstance(asked, AgentDelegateAction) else None
            if task is not None and await _has_task(log, state.setup.conversation_id, task):
                return checksum_of(entry)
    except UnknownConversation:
        return ""
    raise EventsLost(parent.conversation_id, last_id, parent.delegate_id, state.setup.conversation_id)


async def _has_task(log: EventLog, delegate_conversation_id: str, task: str) -> bool:
    """Return whether a delegate was started with this task.

    A secret that was added later may have masked one of the texts.
    """
    begun = await read_event(log, delegate_conversation_id, FIRST_MESSAGE)
    masker = await log.load_masker(delegate_conversation_id)
    return isinstance(begun, MessageAction) and masker.mask_text(begun.content) == masker.mask_text(task)


async def report_failure(log: EventLog, conversation_id: str, reason: str) -> None:
    """Report an unforeseen failure of a conversation to its parent, if it has one. Idempotent."""
    created = await read_event(log, conversation_id, 1)
    if isinstance(created, ConversationCreated) and created.parent is not None:
        text = f"{created.agent.name} encountered an error during execution. {reason}"
        ended = DelegateEnded(
            delegate_id=created.parent.delegate_id,
            conversation_id=conversation_id,
            agent_state=AgentState.ERROR,
            content=text,
        )
        await _append_once(log, created.parent, ended)


def is_over(state: State) -> bool:
    """Return whether a delegate has ended for its parent.

    In the background of a headless run, a question without a deadline also ends it.
    """
    now = state.lifecycle.agent_state
    if now is AgentState.AWAITING_USER_CONFIRMATION and state.setup.agent.confirmation.deadline_seconds is not None:
        return False
    return now in TERMINAL_STATES or (state.setup.headless and now in WAITS_FOR_USER)


def make_delegate_spec(parent: AgentSpec, name: str) -> AgentSpec:
    """Return a delegate's specification: its entry in the parent's specification, or the parent's under this name.

    If the parent must ask for confirmations, its delegates must, too.
    """
    spec = parent.delegates.get(name)
    if spec is None:
        return parent.model_copy(update={"name": name, "goal": None, "output": None, "memory": None})
    if spec.confirmation.mode == "never":
        spec = spec.model_copy(update={"confirmation": parent.confirmation})
    return spec


async def _append_once(log: EventLog, parent: Parent, ended: DelegateEnded, request: str = "") -> None:
    cause = (parent.delegate_id, request) if request else None
    try:
        await log.append(parent.conversation_id, [ended], key=f"delegate:{parent.delegate_id}", cause=cause)
    except UnknownConversation:
        return  # the parent is gone and needs no result


async def _make_result(log: EventLog, state: State) -> tuple[str, dict[str, Any]]:
    name = state.setup.agent.name
    last = (
        await read_event(log, state.setup.conversation_id, state.lifecycle.result_id)
        if state.lifecycle.result_id
        else None
    )
    outputs = _find_outputs(last)
    match state.lifecycle.agent_state:
        case AgentState.FINISHED | AgentState.REJECTED:
            reported = ", ".join(f"{key}: {value}" for key, value in outputs.items() if key != "metrics")
            return f"{name} finishes task with {reported}", outputs
        case AgentState.ERROR:
            return f"{name} encountered an error during execution. {render_error(state.lifecycle.last_error)}", {}
        case AgentState.AWAITING_USER_INPUT:
            said = last.content if isinstance(last, MessageAction) else "it waits for a message"
            return f"{name} ends with a question that nobody is there to answer: {said}", {}
        case AgentState.AWAITING_USER_CONFIRMATION:
            return f"{name} needs a person to confirm an action, and nobody is there.", {}
    return f"{name} was stopped.", {}


def _find_outputs(last: Event | None) -> dict[str, Any]:
    if isinstance(last, AgentFinishAction):
        # The tool returns only a message; the original does not show it to the parent.
        return dict(last.outputs) or {"result": last.final_thought}
    return dict(last.outputs) if isinstance(last, AgentRejectAction) else {}


def _compute_limits(state: State, delegate: Delegate, now: datetime) -> Limits:
    seconds = None
    if state.usage.deadline is not None:
        seconds = max((state.usage.deadline - now).total_seconds() * TIME_SHARE, 1.0)
    return state.setup.limits.model_copy(
        update={
            "max_iterations": delegate.iterations,
            "max_budget_usd": delegate.budget_usd,
            "max_tokens": delegate.tokens,
            "max_seconds": seconds,
        }
    )
