"""Helpers for tests of the controller: a conversation driven through the real core, without I/O.

Holds: it does exactly the shell's work (append the wanted events, settle, dispatch); model
replies and observations are the test's.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from broker.contract.actions import ChangeAgentStateAction, MessageAction, RiskyAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import (
    AgentSpec,
    ConversationCreated,
    Event,
    EventSource,
    Limits,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    Observation,
    Parent,
    TokenUsage,
    WorkspaceSpec,
    with_id,
)
from broker.contract.fencing import Ownership
from broker.contract.notes import Note
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    MCPQuestionObservation,
)
from broker.contract.recall import RecallAction
from broker.contract.skills import NO_SKILLS
from broker.limits.quotas import QuotaTable
from broker.store import ShardLayout
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer
from controller_worker.agents.registry import create_agent
from controller_worker.core.commit import Commit, settle
from controller_worker.core.concerns.acceptance import check_outputs
from controller_worker.core.concerns.confirmation import apply_answer
from controller_worker.core.concerns.inbox import make_recall
from controller_worker.core.concerns.survey import parse_survey_skills
from controller_worker.core.controller import apply, next_effect
from controller_worker.core.effects import Append, AwaitTools, CallModel, CarryOut, Effect, Greet, Recall
from controller_worker.core.state import State, parse_snapshot, to_snapshot
from controller_worker.loop.answers import make_greeting
from controller_worker.loop.replay import replay
from controller_worker.memory.conversation_memory import ConversationMemory, PromptOptions
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.model.permits.permits import Permits
from controller_worker.providers.messages.messages import Message
from controller_worker.security.assessment import assess

E = TypeVar("E", bound=Event)

CID = "conversation-1"
WORKSPACE = WorkspaceSpec(path="/srv/project")
START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def call(name: str, arguments: str = "{}", call_id: str = "") -> ModelToolCall:
    """A tool call as a model writes it; without an id, the one made of its name."""
    return ModelToolCall(id=call_id or f"call-{name}", name=name, arguments=arguments)


def bash(command: str = "ls", call_id: str = "c1") -> ModelToolCall:
    return call("execute_bash", f'{{"command": "{command}", "security_risk": "LOW"}}', call_id)


def think(thought: str = "hm", call_id: str = "t1") -> ModelToolCall:
    return call("think", f'{{"thought": "{thought}"}}', call_id)


def finish(message: str = "done", call_id: str = "f1") -> ModelToolCall:
    return call("finish", f'{{"message": "{message}"}}', call_id)


def answer(action: Event, text: str = "a.txt") -> CmdOutputObservation:
    """The output of a command, as a tool worker appends it."""
    return CmdOutputObservation(
        content=text,
        command="ls",
        metadata=CmdOutputMetadata(exit_code=0),
        cause=action.id,
        source=action.source,
        tool_call_metadata=action.tool_call_metadata,
    )


def free_permit() -> CallPermit:
    """A permit where there is neither a quota nor a budget; it never asks the store."""
    store = Store(MemoryConnection(MemoryServer(ManualClock())), ShardLayout(1), generation="")
    return CallPermit(Permits(store, QuotaTable()), Ownership(CID, "controller-1", "1"))


class Core:
    """One conversation: its log, the state folded from it, and every commit the core made."""

    def __init__(
        self,
        task: str | None = "task",
        *,
        agent: AgentSpec | None = None,
        limits: Limits | None = None,
        headless: bool = True,
        surveys: bool = False,
        workspace: WorkspaceSpec = WORKSPACE,
        parent: Parent | None = None,
        **created_with: Any,
    ) -> None:
        agent = (agent or AgentSpec()).model_copy(update={"enable_workspace_skills": surveys})
        self.now = START
        self.events: list[Event] = []
        self.commits: list[Commit] = []
        self.dispatched: list[int] = []
        self.notes: tuple[Note, ...] = ()
        self.state = State()
        self.agent = create_agent(agent)
        created = ConversationCreated(
            conversation_id=CID,
            agent=agent,
            workspace=workspace,
            limits=limits or Limits(),
            headless=headless,
            parent=parent,
            **created_with,
        )
        self.put(created, *([said(task)] if task is not None else []))

    def put(self, *events: Event) -> None:
        for event in events:
            stamped = with_id(event, self.state.version + 1).model_copy(update={"timestamp": self.now})
            self.events.append(stamped)
            before, self.state = self.state.setup.agent, apply(self.state, stamped)
            if stamped.id > 1 and self.state.setup.agent is not before:
                self.agent = create_agent(self.state.setup.agent)

    def say(self, text: str = "and this") -> None:
        self.put(said(text))

    def ask(self, state: str) -> None:
        self.put(ChangeAgentStateAction(agent_state=AgentState(state), source=EventSource.USER))

    def wants(self) -> Effect:
        return next_effect(self.state, self.now)

    def commit(self, wanted: Append) -> None:
        commit = settle(self.state, wanted, self.now)
        first_id = self.state.version + 1
        for event in commit.events:
            self.put(event)
        assert self.state == commit.state
        self.commits.append(commit)
        self.dispatched += [first_id + position for position in commit.dispatch]

    def run(self) -> Effect:
        """Append what is wanted until something else is, and return that."""
        while isinstance(effect := self.wants(), Append | Greet | Recall | CarryOut):
            self.commit(self._append_of(effect))
        if isinstance(effect, AwaitTools):
            self.dispatched += [action_id for action_id in effect.action_ids if action_id not in self.dispatched]
        return effect

    def _append_of(self, effect: Append | Greet | Recall | CarryOut) -> Append:
        if isinstance(effect, Greet):
            return make_greeting(self.agent, self.state)
        if isinstance(effect, Recall):
            answer = self.event(effect.survey_id) if effect.survey_id else None
            skills = parse_survey_skills(answer) if isinstance(answer, Observation) else NO_SKILLS
            return make_recall(self.state, skills, self.notes)
        if isinstance(effect, Append):
            return effect
        action, answered = self.event(effect.action_id), self.event(effect.answer_id)
        assert isinstance(action, RiskyAction)
        assert isinstance(answered, ChangeAgentStateAction | MCPQuestionObservation)
        return apply_answer(self.state, action, answered)

    def reply(self, *calls: ModelToolCall, text: str = "", seen_id: int | None = None, **fields: Any) -> Effect:
        """Let the model answer, by default the prompt made from the log as it is."""
        event = ModelReply(
            id=self.state.version + 1,
            content=text,
            tool_calls=calls,
            model="acme/large",
            iteration=self.state.usage.iteration + 1,
            seen_id=self.state.version if seen_id is None else seen_id,
            **{"cost_usd": 0.25, "usage": TokenUsage(prompt_tokens=100, completion_tokens=10)} | fields,
        )
        events = (event, *check_outputs(self.agent.events_of(event), self.state.setup.agent.output))
        return self.append(*assess(events, self.state.setup.agent.confirmation, WORKSPACE))

    def append(self, *events: Event) -> Effect:
        """Append what the shell made of a model's answer."""
        self.commit(Append(events))
        return self.run()

    def fail(self, code: str, *, retry_in: float | None, last_error: str = "Oops: no") -> Effect:
        wanted = self.wants()
        assert isinstance(wanted, CallModel)
        until = None if retry_in is None else self.now + timedelta(seconds=retry_in)
        return self.append(ModelCallFailed(code=code, last_error=last_error, attempt=wanted.attempt, retry_at=until))

    def observe(self, action_id: int, observation: Observation | None = None) -> Effect:
        self.put(observation or answer(self.event(action_id)))
        return self.run()

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def event(self, event_id: int, kind: type[E] = Event) -> E:  # type: ignore[assignment]
        """Return an event, which must be of this kind; counted from the end when the id is negative."""
        found = self.events[event_id - 1 if event_id > 0 else event_id]
        assert isinstance(found, kind), found
        return found

    def trace(self, *, after: int = 0) -> list[str]:
        """Return the log in the notation of the golden traces, one line an event."""
        return [traced(event) for event in self.events[after:]]

    def states(self) -> list[str]:
        return [e.agent_state.value for e in self.events if isinstance(e, AgentStateChangedObservation)]


def messages_of(events: Iterable[Event], **options: Any) -> list[Message]:
    """Return the messages that a model would get from a log."""
    memory = ConversationMemory(PromptOptions(**options))
    for event in events:
        memory.add(event)
    return memory.messages()


def check_snapshots(core: Core) -> None:
    """Check that continuing from a snapshot of any event leads to the same state."""
    state = State()
    for event in core.events:
        after = apply(state, event)
        restored = parse_snapshot(to_snapshot(after))
        assert restored == after, event.id
        state = restored
    assert state == core.state


def check_replay(core: Core) -> None:
    """Check that deciding the log again, offline, leads to the same log."""
    divergence = replay(core.events).divergence
    assert divergence is None, divergence.to_diff()


def said(text: str) -> MessageAction:
    return MessageAction(content=text, source=EventSource.USER)


def started(task: str = "task", **options: Any) -> Core:
    """A conversation that wants its first model call; its log has 6 events."""
    core = Core(task, **options)
    assert core.run() == CallModel(1, 1)
    return core


_SHORT = {
    "ConversationCreated": "Created",
    "SystemMessageAction": "SystemMessage",
    "MessageAction": "Message",
    "RecallAction": "Recall",
    "RecallObservation": "RecallObs",
    "NullObservation": "NullObs",
    "ErrorObservation": "ErrorObs",
    "CmdRunAction": "CmdRun",
    "CmdOutputObservation": "CmdOutput",
    "AgentThinkAction": "Think",
    "AgentThinkObservation": "ThinkObs",
    "AgentFinishAction": "Finish",
    "AgentRejectAction": "Reject",
    "ChangeAgentStateAction": "ChangeState",
}


def traced(event: Event) -> str:
    """Return one event as the golden traces write it: id, name, source, cause, detail."""
    if isinstance(event, AgentStateChangedObservation):
        assert event.source is EventSource.ENVIRONMENT
        return f"{event.id} SC {event.agent_state.value}"
    name = _SHORT.get(type(event).__name__, type(event).__name__)
    cause = f", cause {event.cause}" if event.cause else ""
    detail = ""
    if isinstance(event, RecallAction):
        detail = f" {event.recall_type.value}"
    elif isinstance(event, ChangeAgentStateAction):
        detail = f" {event.agent_state.value}"
    elif isinstance(event, MessageAction) and event.wait_for_response:
        detail = " wait"
    return f"{event.id} {name}({event.source.value}{cause}){detail}"


def system_message() -> SystemMessageAction:
    return SystemMessageAction(content="You help.")
