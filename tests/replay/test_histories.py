"""Random histories: with any order of users, tools and models, the core keeps its promises."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.contract.actions import AgentFinishAction, MessageAction
from broker.contract.agent_state import TERMINAL_STATES, AgentState, is_settled
from broker.contract.events import (
    AgentSpec,
    EventSource,
    Limits,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    Observation,
)
from broker.contract.observations import AgentStateChangedObservation
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.core.controller import fold, next_effect
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Park, Rest
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.providers.messages.messages import Message, TextPart
from tests.controller_parts import CID, Core, answer, bash, call, check_snapshots, finish, messages_of, think
from tests.exploring import examples

MAX_EFFECTS_TO_SETTLE = 400

calls = st.lists(
    st.sampled_from(
        [
            bash(call_id="b1"),
            bash(call_id="b2"),
            bash(call_id="b3"),
            think(),
            finish(),
            call("execute_bash", "{", "bad"),
            call("no_such_tool", call_id="unknown"),
        ]
    ),
    max_size=3,
    unique_by=lambda made: made.id,
)
is_prompt = st.sampled_from([True, True, True, False])
"""Whether the worker has acted before the next thing happens."""


class History(RuleBasedStateMachine):
    """One conversation. A started model call ends some time later, after any other events."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core(task=None)
        self.thinking: tuple[CallModel, int] | None = None
        self.memory = ConversationMemory()
        self.taken = 0
        self.shown: list[Message] = []
        self.folded = State()

    @initialize(
        concurrency=st.integers(1, 3),
        iterations=st.sampled_from([2, 5, 100]),
        budget=st.sampled_from([None, None, 0.5]),
        headless=st.booleans(),
    )
    def begin(self, concurrency: int, iterations: int, budget: float | None, headless: bool) -> None:
        self.core = Core(
            "task",
            agent=AgentSpec(tool_concurrency=concurrency),
            limits=Limits(max_iterations=iterations, max_budget_usd=budget),
            headless=headless,
        )
        self.act()

    # Events

    @rule(is_prompt=is_prompt)
    def message(self, is_prompt: bool) -> None:
        self.core.say(f"<m{self.core.state.version + 1}>")
        self.act_if(is_prompt)

    @rule(state=st.sampled_from(["running", "running", "paused", "stopped", "finished"]), is_prompt=is_prompt)
    def request(self, state: str, is_prompt: bool) -> None:
        self.core.ask(state)
        self.act_if(is_prompt)
        if state == "running" and is_prompt:
            assert not isinstance(self.core.wants(), Park)

    @rule(seconds=st.sampled_from([1, 8, 100]))
    def time(self, seconds: float) -> None:
        self.core.pass_time(seconds)
        self.act()

    @precondition(lambda self: self.thinking is not None)
    @rule(calls=calls, is_talking=st.booleans())
    def model_replies(self, calls: Sequence[ModelToolCall], is_talking: bool) -> None:
        self.answer_with(*calls, text=f"<r{self.core.state.version + 1}>" if is_talking else "")
        self.act()

    @precondition(lambda self: self.thinking is not None)
    @rule(code=st.sampled_from(["rate_limit", "internal", "authentication"]), wait=st.sampled_from([None, 0, 8, 60]))
    def model_fails(self, code: str, wait: float | None) -> None:
        assert self.thinking is not None
        wanted, _ = self.thinking
        self.thinking = None
        if self.is_cancelled():
            return
        until = None if wait is None or code == "authentication" else self.core.now + timedelta(seconds=wait)
        self.core.append(ModelCallFailed(code=code, last_error="no", attempt=wanted.attempt, retry_at=until))
        self.act()

    @precondition(lambda self: self.unanswered())
    @rule(data=st.data(), is_prompt=is_prompt)
    def tool_answers(self, data: st.DataObject, is_prompt: bool) -> None:
        self.core.put(answer(self.core.event(data.draw(st.sampled_from(self.unanswered())))))
        self.act_if(is_prompt)

    # The shell's part

    def act_if(self, is_prompt: bool) -> None:
        if is_prompt:
            self.act()

    def act(self) -> None:
        effect = self.core.run()
        self.check_rest(effect)
        if isinstance(effect, CallModel) and self.thinking is None:
            self.thinking = (effect, self.core.state.version)
            self.check_prompt()

    def answer_with(self, *calls: ModelToolCall, text: str) -> None:
        assert self.thinking is not None
        _, seen_id = self.thinking
        self.thinking = None
        if not self.is_cancelled():
            self.core.reply(*calls, text=text, seen_id=seen_id)

    def is_cancelled(self) -> bool:
        """A stop or an error cancels the call, and drops its answer."""
        return self.core.state.lifecycle.agent_state in (AgentState.STOPPED, AgentState.ERROR)

    def unanswered(self) -> list[int]:
        """Dispatched actions that the store would still take an observation for."""
        settled = {event.cause for event in self.core.events if isinstance(event, Observation)}
        return [action_id for action_id in self.core.dispatched if action_id not in settled]

    # Invariants

    def check_rest(self, effect: Effect) -> None:
        """A reader of the log alone agrees with the core, and every request has an answer."""
        core = self.core
        stands = fold_status(core.events)
        assert (stands.state, stands.is_unanswered) == (core.state.lifecycle.agent_state, False)
        states = core.states()
        assert all(one != next_one for one, next_one in pairwise(states)), states
        if core.state.lifecycle.agent_state in TERMINAL_STATES:
            assert effect == Rest()
            assert core.state.tools.pending == ()
        assert len(core.dispatched) == len(set(core.dispatched))
        if isinstance(effect, CallModel):
            assert core.state.lifecycle.agent_state is AgentState.RUNNING
            assert core.state.tools.pending == ()
        if isinstance(effect, AwaitTools):
            assert len(effect.action_ids) <= core.state.setup.agent.tool_concurrency
            assert not set(effect.action_ids) - set(self.unanswered())

    def check_prompt(self) -> None:
        """Shown messages are shown again; calls have results; no answer refers to an unseen message."""
        for event in self.core.events[self.taken :]:
            self.memory.add(event)
        self.taken = len(self.core.events)
        messages = self.memory.messages()
        assert messages[: len(self.shown)] == self.shown
        self.shown = messages
        assert [message.role for message in messages].count("system") == 1
        assert messages[0].role == "system"
        assert messages[-1].role in ("user", "tool")
        expected: list[str] = []
        for message in messages[1:]:
            if message.role == "tool":
                assert message.tool_call_id == expected.pop(0)
            else:
                assert expected == [], f"calls without results before {message}"
                expected = [made.id for made in message.tool_calls]
        assert expected == []
        self.check_order(messages)

    def check_order(self, messages: Sequence[Message]) -> None:
        said = [part.text.strip() for m in messages for part in m.content if isinstance(part, TextPart)]
        for reply in self.core.events:
            if isinstance(reply, ModelReply) and f"<r{reply.id}>" in said:
                for message in self.core.events:
                    if f"<m{message.id}>" in said:
                        is_before = said.index(f"<m{message.id}>") < said.index(f"<r{reply.id}>")
                        assert is_before == (message.id <= reply.seen_id), (message.id, reply.id, reply.seen_id)

    @invariant()
    def deciding_is_a_function_of_state_and_time(self) -> None:
        self.folded = fold(self.folded, self.core.events[self.folded.version :])
        assert next_effect(self.folded, self.core.now) == self.core.wants()

    @invariant()
    def the_log_keeps_its_promises(self) -> None:
        assert find_violations(self.core.events, conversation_id=CID, is_over=False) == []

    @invariant()
    def a_turn_ends_only_when_the_agent_has_heard_everything_and_says_so(self) -> None:
        last_end, heard, last_message, ending = 0, 0, 0, 0
        for event in self.core.events:
            match event:
                case ModelReply():
                    heard = event.seen_id
                case AgentFinishAction() | MessageAction(source=EventSource.AGENT):
                    ending = event.id
                case MessageAction():
                    last_message = event.id
                case AgentStateChangedObservation(agent_state=AgentState.FINISHED | AgentState.AWAITING_USER_INPUT):
                    assert heard >= last_message
                    assert ending > last_end
                    last_end = event.id
                case AgentStateChangedObservation(agent_state=AgentState.STOPPED | AgentState.ERROR):
                    last_end = event.id

    def teardown(self) -> None:
        """From wherever the history has led, it comes to rest when tools answer and the model finishes."""
        core = self.core
        core.say("and now end it")
        for _ in range(MAX_EFFECTS_TO_SETTLE):
            self.act()
            if self.thinking is not None:
                self.answer_with(finish(), text="")
            elif not self.has_moved_on(core.wants()):
                break
        assert is_settled(core.state.lifecycle.agent_state), core.trace()
        assert fold_status(core.events).is_settled
        assert find_violations(core.events, conversation_id=CID) == []
        check_snapshots(core)
        self.check_remembering()
        self.check_replay()

    def has_moved_on(self, effect: Effect) -> bool:
        if isinstance(effect, AwaitTools):
            self.core.put(answer(self.core.event(effect.action_ids[-1])))
        elif isinstance(effect, Park):
            self.core.now = effect.until
        return isinstance(effect, AwaitTools | Park)

    def check_replay(self) -> None:
        """Deciding the log again leads to the same log."""
        found = replay(self.core.events)
        assert found.divergence is None, found.divergence.to_diff()

    def check_remembering(self) -> None:
        """Asking at every event changes nothing."""
        asked = ConversationMemory()
        for event in self.core.events:
            asked.add(event)
            asked.messages()
        assert asked.messages() == messages_of(self.core.events)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=examples(40), stateful_step_count=40)
