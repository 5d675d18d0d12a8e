"""The core against a small model: in any order of users, tools and models, both reach the same state.

The model knows states, pending actions, waits of calls, limits and the allowed starts. It knows nothing of
events, folds or effects.
"""

from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Limits, ModelCallAdmitted, ModelCallDeferred
from broker.contract.observations import AgentStateChangedObservation
from controller_worker.core.concerns.model_calls import BATCH, BUDGET, QUOTA
from controller_worker.core.effects import AwaitTools, CallModel, Park, Rest
from controller_worker.core.state import parse_snapshot, to_snapshot
from tests.controller_parts import Core, bash, call, finish, think
from tests.exploring import examples

RETRY_SECONDS = 8.0
PASSING_SECONDS = RETRY_SECONDS + 1
MAX_TIMES = 4
ENDS = {"question": "awaiting_user_input", "finish": "finished"}
CLOSED = ("stopped", "error")
"""The shell drops an answer that comes in one of these states."""
AT_WORK = ("running", "rate_limited")


class Model:
    """The state of a conversation."""

    def __init__(self, *, headless: bool, iterations: int, seconds: float | None) -> None:
        self.headless = headless
        self.state = "running"
        self.outstanding: list[int] = []
        self.used = 0
        self.allowed = self.step = iterations
        self.seconds = seconds
        self.left = seconds
        self.ending = ""
        self.gate = ""
        self.waits = False
        self.has_spoken_since = False

    def person_speaks(self) -> None:
        """A message: work continues, whatever was planned before."""
        self.ending = ""
        self.waits = False
        self.has_spoken_since = True
        self.go_on()

    def go_on(self) -> None:
        """Apply a message or a resume: it ends a wait, and raises a used-up limit of an interactive conversation."""
        self.waits = False
        if self.state == "error" and not self.headless and self.used >= self.allowed:
            self.allowed += self.step
        if self.state not in AT_WORK:
            self.left = self.seconds
        self.state = "running"
        self.settle()

    def pauses(self) -> None:
        self.state = "paused"
        self.settle()

    def stops(self) -> None:
        self.state = "stopped"
        self.waits = False
        self.settle()

    def replies(self, ending: str, calls: list[int], *, is_outdated: bool) -> None:
        """Apply a reply: it uses a step, its actions become pending, and its finish counts if it knew every message."""
        self.used += 1
        self.waits, self.gate = False, ""
        self.outstanding += calls
        if ending and not is_outdated:
            self.ending = ending
        self.settle()

    def tool_answers(self) -> None:
        self.outstanding.pop(0)
        self.settle()

    def call_has_to_wait(self, gate: str) -> None:
        """Make a call wait for a quota, a budget or a batch until that admits it, whatever users do."""
        self.gate = gate
        self.settle()

    def call_may_be_made(self) -> None:
        self.gate = ""
        if self.state == "rate_limited":
            self.state = "running"
        self.settle()

    def call_fails(self, *, is_final: bool) -> None:
        self.gate = ""
        if is_final:
            self.ending = "error"
        else:
            self.waits = True
        self.settle()

    def time_passes(self) -> None:
        """Time is used up at work only; a pause, and whatever ends the work, is not counted."""
        self.waits = False
        if self.left is not None:
            self.left -= PASSING_SECONDS
        if self.state == "rate_limited" and not self.gate:
            self.state = "running"
        self.settle()

    def settle(self) -> None:
        """Take up what follows by itself: an end, once nothing is outstanding; the end of time; a wait; a limit."""
        if self.ending and self.state in ("running", "paused") and (self.ending == "error" or not self.outstanding):
            self.state, self.ending = self.ending, ""
        if self.state in AT_WORK and self.left is not None and self.left <= 0:
            self.state = "error"
        if self.state == "running" and not self.outstanding:
            if self.gate == QUOTA or (self.waits and not self.gate):
                self.state = "rate_limited"
            elif self.used >= self.allowed and not self.gate:
                self.state = "error"
        if self.state in CLOSED:
            self.outstanding, self.ending = [], ""
        if self.state not in AT_WORK:
            self.gate = ""

    @property
    def wants(self) -> type:
        """Return the next decision."""
        if self.gate:
            return CallModel
        if self.state == "rate_limited":
            return Park
        if self.state != "running":
            return Rest
        return AwaitTools if self.outstanding else CallModel


def happening(name: str, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """One that is a method of the machine, with its arguments."""
    return st.tuples(st.just(name), st.fixed_dictionaries(values))


work = happening(
    "work_goes_on",
    commands=st.integers(0, 3),
    thinks=st.booleans(),
    end=st.sampled_from(["", "question", "finish", "finish"]),
    is_outdated=st.sampled_from([False, False, True]),
    interrupted=st.sampled_from(["", "", "message", "paused", "stopped", "too late"]),
)
happenings = st.one_of(
    work,
    work,
    work,
    happening("a_person_speaks"),
    happening("a_person_asks", wanted=st.sampled_from(["running", "running", "paused", "stopped"])),
    happening("the_call_has_to_wait", gate=st.sampled_from([QUOTA, BUDGET, BATCH, BATCH])),
    happening("the_call_fails", is_final=st.booleans()),
    happening("the_call_fails", is_final=st.booleans()),
    happening("time_passes", times=st.sampled_from([1, MAX_TIMES])),
)
"""As likely as they are listed here: rules of their own would be chosen so that few histories go far."""


class ControllerMachine(RuleBasedStateMachine):
    """A conversation of the real core beside the model's."""

    core: Core
    model: Model

    @initialize(
        headless=st.booleans(),
        concurrency=st.integers(1, 3),
        iterations=st.sampled_from([2, 3, 1000]),
        seconds=st.sampled_from([None, MAX_TIMES * PASSING_SECONDS]),
    )
    def begin(self, headless: bool, concurrency: int, iterations: int, seconds: float | None) -> None:
        # Repetitions are not part of this model.
        agent = AgentSpec(tool_concurrency=concurrency, enable_stuck_detection=False)
        limits = Limits(max_iterations=iterations, max_seconds=seconds)
        self.core = Core(agent=agent, limits=limits, headless=headless)
        self.core.run()
        self.model = Model(headless=headless, iterations=iterations, seconds=seconds)
        self.seen_id: int | None = None
        self.number = 0
        self.goes_on()

    def goes_on(self) -> None:
        """Do the shell's own work: start a wanted call, and drop one whose conversation has ended."""
        if self.model.state in CLOSED:
            self.seen_id = None
        elif self.seen_id is None and not self.model.gate and self.model.wants is CallModel:
            self.seen_id = self.core.state.version
            self.model.has_spoken_since = False

    @rule(what=happenings)
    def happens(self, what: tuple[str, dict[str, Any]]) -> None:
        name, values = what
        getattr(self, name)(**values)
        self.goes_on()

    def a_person_speaks(self) -> None:
        self.core.say()
        self.core.run()
        self.model.person_speaks()

    def a_person_asks(self, wanted: str) -> None:
        self.core.ask(wanted)
        self.core.run()
        {"running": self.model.go_on, "paused": self.model.pauses, "stopped": self.model.stops}[wanted]()

    def work_goes_on(self, commands: int, thinks: bool, end: str, is_outdated: bool, interrupted: str) -> None:
        """Deliver the awaited result, or let a user start the conversation again.

        A user may write before a reply arrives, and may stop its actions so that the conversation continues afterwards.
        """
        if self.seen_id is not None:
            if is_outdated:
                self.a_person_speaks()
            self.the_model_answers(commands, thinks, end)
            match interrupted:
                case "":
                    return
                case "message":
                    self.a_person_speaks()
                case "too late":
                    self.time_passes(times=MAX_TIMES)
                case _:
                    self.a_person_asks(interrupted)
            self.a_person_asks("running")
        elif self.model.gate:
            self.core.append(ModelCallAdmitted())
            self.model.call_may_be_made()
        elif self.model.outstanding:
            for action_id in self.model.outstanding[: commands + 1]:
                self.core.observe(action_id)
                self.model.tool_answers()
        elif self.model.state == "rate_limited":
            self.time_passes(times=1)
        else:
            self.a_person_speaks()

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

    def the_call_has_to_wait(self, gate: str) -> None:
        if self.seen_id is not None and self.model.wants is CallModel and not self.model.gate:
            self.core.append(ModelCallDeferred(code=gate))
            self.model.call_has_to_wait(gate)
            if gate != BATCH:  # a batch has the call, and brings its answer some time
                self.seen_id = None

    def the_call_fails(self, is_final: bool) -> None:
        if self.seen_id is not None and self.model.wants is CallModel:
            code = "authentication" if is_final else "rate_limit"
            self.core.fail(code, retry_in=None if is_final else RETRY_SECONDS)
            self.model.call_fails(is_final=is_final)
            self.seen_id = None

    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.core.pass_time(PASSING_SECONDS)
            self.core.run()
            self.model.time_passes()

    def next_number(self) -> int:
        self.number += 1
        return self.number

    @invariant()
    def both_stand_in_one_place(self) -> None:
        state, model = self.core.state, self.model
        assert state.lifecycle.agent_state == model.state
        assert [pending.id for pending in state.tools.pending] == model.outstanding
        assert (state.usage.iteration, state.usage.max_iterations) == (model.used, model.allowed)
        assert (state.calls.deferral.reason if state.calls.deferral else "") == model.gate
        wanted = self.core.wants()
        assert isinstance(wanted, model.wants), wanted
        if isinstance(wanted, AwaitTools):
            ready = model.outstanding[: state.setup.agent.tool_concurrency]
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
        assert parse_snapshot(to_snapshot(self.core.state)) == self.core.state


TestController = ControllerMachine.TestCase
TestController.settings = settings(max_examples=examples(100), stateful_step_count=30)
