"""The core against a model of one page: whatever people, tools and models do, in any order, both stand in one place.

The model knows states, what is outstanding, limits and what may be begun. It knows nothing of events, folds or effects.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.agent_state import AgentState
from broker.events import AgentSpec, Limits
from broker.observations import AgentStateChangedObservation
from controller_worker.controller import AwaitTools, CallModel, Park, Rest
from controller_worker.state import snapshot_of, state_from
from tests.controller_parts import Core, bash, call, finish, think

MAX_ITERATIONS = 2
RETRY_SECONDS = 8.0
ENDS = {"question": "awaiting_user_input", "finish": "finished"}
CLOSED = ("stopped", "error")
"""The shell drops an answer that comes in one of these states."""


class Model:
    """Where a conversation stands."""

    def __init__(self, *, headless: bool) -> None:
        self.headless = headless
        self.state = "running"
        self.outstanding: list[int] = []
        self.used = 0
        self.allowed = MAX_ITERATIONS
        self.ending = ""
        self.waits = False
        self.has_spoken_since = False

    def person_speaks(self) -> None:
        """A message: work goes on, whatever was planned before."""
        self.ending = ""
        self.waits = False
        self.has_spoken_since = True
        self.go_on()

    def go_on(self) -> None:
        """A message, or a resume: a wait is over, and after an error a limit that was used up grows if somebody is there."""
        self.waits = False
        if self.state == "error" and not self.headless and self.used >= self.allowed:
            self.allowed += MAX_ITERATIONS
        self.state = "running"
        self.settle()

    def pauses(self) -> None:
        self.state = "paused"
        self.settle()

    def stops(self) -> None:
        self.state = "stopped"
        self.outstanding, self.ending, self.waits = [], "", False

    def replies(self, ending: str, calls: list[int], *, is_outdated: bool) -> None:
        """A reply uses up a step; what it wants run is outstanding, and its end counts if it knew all that was said."""
        self.used += 1
        self.waits = False
        self.outstanding += calls
        if ending and not is_outdated:
            self.ending = ending
        self.settle()

    def tool_answers(self) -> None:
        self.outstanding.pop(0)
        self.settle()

    def call_fails(self, *, is_final: bool) -> None:
        if is_final:
            self.ending = "error"
        else:
            self.waits = True
        self.settle()

    def time_passes(self) -> None:
        self.waits = False
        if self.state == "rate_limited":
            self.state = "running"
        self.settle()

    def settle(self) -> None:
        """Take up what follows by itself: an end, once nothing is outstanding; a wait; a limit."""
        if self.ending and self.state in ("running", "paused") and (self.ending == "error" or not self.outstanding):
            self.state, self.ending = self.ending, ""
            if self.state == "error":
                self.outstanding = []
        if self.state == "running" and not self.outstanding:
            if self.waits:
                self.state = "rate_limited"
            elif self.used >= self.allowed:
                self.state = "error"

    @property
    def wants(self) -> type:
        """What is done next."""
        if self.state == "rate_limited":
            return Park
        if self.state != "running":
            return Rest
        return AwaitTools if self.outstanding else CallModel


class ControllerMachine(RuleBasedStateMachine):
    """A conversation of the real core beside the model's."""

    core: Core
    model: Model

    @initialize(headless=st.booleans(), concurrency=st.integers(1, 3))
    def begin(self, headless: bool, concurrency: int) -> None:
        # What repeats itself is none of this model's business.
        agent = AgentSpec(tool_concurrency=concurrency, enable_stuck_detection=False)
        self.core = Core(agent=agent, limits=Limits(max_iterations=MAX_ITERATIONS), headless=headless)
        self.core.run()
        self.model = Model(headless=headless)
        self.seen_id: int | None = None
        self.number = 0
        self.goes_on()

    def goes_on(self) -> None:
        """Do what the shell does by itself: begin a call that is wanted, and drop one whose conversation has ended."""
        if self.model.state in CLOSED:
            self.seen_id = None
        elif self.seen_id is None and self.model.wants is CallModel:
            self.seen_id = self.core.state.version
            self.model.has_spoken_since = False

    @rule()
    def a_person_speaks(self) -> None:
        self.core.say()
        self.core.run()
        self.model.person_speaks()
        self.goes_on()

    @rule(wanted=st.sampled_from(["running", "paused", "stopped"]))
    def a_person_asks(self, wanted: str) -> None:
        self.core.ask(wanted)
        self.core.run()
        {"running": self.model.go_on, "paused": self.model.pauses, "stopped": self.model.stops}[wanted]()
        self.goes_on()

    @precondition(lambda self: self.seen_id is not None)
    @rule(commands=st.integers(0, 3), thinks=st.booleans(), end=st.sampled_from(["", "question", "finish"]))
    def the_model_answers(self, commands: int, thinks: bool, end: str) -> None:
        calls = [bash(f"true {self.next_number()}", f"c{self.number}") for _ in range(commands)]
        if thinks:
            calls.append(think(f"{self.next_number()}", f"c{self.number}"))
        if end == "finish":
            calls.append(finish("done", f"c{self.next_number()}"))
        elif end == "question":
            calls = []
        elif not calls:
            calls = [call("nowhere", "{}", f"c{self.next_number()}")]
        first_id = self.core.state.version + 2
        self.core.reply(*calls, text=f"I say {self.next_number()}.", seen_id=self.seen_id)
        ids = list(range(first_id, first_id + (0 if end == "question" else commands)))
        self.model.replies(ENDS.get(end, ""), ids, is_outdated=self.model.has_spoken_since)
        self.seen_id = None
        self.goes_on()

    @precondition(lambda self: self.seen_id is not None and self.model.wants is CallModel)
    @rule(is_final=st.booleans())
    def the_call_fails(self, is_final: bool) -> None:
        code = "authentication" if is_final else "rate_limit"
        self.core.fail(code, retry_in=None if is_final else RETRY_SECONDS)
        self.model.call_fails(is_final=is_final)
        self.seen_id = None
        self.goes_on()

    @precondition(lambda self: bool(self.model.outstanding))
    @rule(is_all=st.booleans())
    def tools_answer(self, is_all: bool) -> None:
        for action_id in self.model.outstanding[: None if is_all else 1]:
            self.core.observe(action_id)
            self.model.tool_answers()
        self.goes_on()

    @rule()
    def time_passes(self) -> None:
        self.core.pass_time(RETRY_SECONDS + 1)
        self.core.run()
        self.model.time_passes()
        self.goes_on()

    def next_number(self) -> int:
        self.number += 1
        return self.number

    @invariant()
    def both_stand_in_one_place(self) -> None:
        state, model = self.core.state, self.model
        assert state.agent_state == model.state
        assert [pending.id for pending in state.pending] == model.outstanding
        assert (state.iteration, state.max_iterations) == (model.used, model.allowed)
        wanted = self.core.wants()
        assert isinstance(wanted, model.wants), wanted
        if isinstance(wanted, AwaitTools):
            ready = model.outstanding[: state.agent.tool_concurrency]
            assert list(wanted.action_ids) == ready
            assert set(ready) <= set(self.core.dispatched)

    @invariant()
    def nothing_runs_that_was_not_begun_while_it_might(self) -> None:
        begun = self.core.dispatched
        assert len(begun) == len(set(begun))

    @invariant()
    def no_state_is_announced_twice_in_a_row(self) -> None:
        states = [event.agent_state for event in self.core.events if isinstance(event, AgentStateChangedObservation)]
        assert all(one is not other for one, other in pairwise(states)), states
        assert not states or states[-1] is AgentState(self.model.state)

    @invariant()
    def a_snapshot_gives_the_state_back(self) -> None:
        assert state_from(snapshot_of(self.core.state)) == self.core.state


TestController = ControllerMachine.TestCase
TestController.settings = settings(max_examples=80, stateful_step_count=40)
