"""A random conversation with everything at once: delegates, questions, goals, outputs, loops, plans, notes, overflows.

Holds: the same seed gives the same history; the core's own functions do the shell's work.
"""

import json
from datetime import timedelta
from random import Random
from typing import Any

from broker.contract.actions import ChangeAgentStateAction, CondensationAction, LoopRecoveryAction
from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import AmortizedForgettingCondenserSpec, ConversationWindowCondenserSpec
from broker.contract.events import (
    AgentSpec,
    DelegateEnded,
    Event,
    EventSource,
    Limits,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    Observation,
)
from broker.contract.notes import NoteObservation
from broker.contract.observations import ErrorObservation, SuccessObservation
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.contract.specs import CriticSpec, GoalSpec, MemorySpec, OutputSpec, PlanSpec
from controller_worker.core.announcement import to_answer
from controller_worker.core.concerns.acceptance import needs_verdict
from controller_worker.core.concerns.delegation import STARTED
from controller_worker.core.effects import Append, AwaitDelegates, AwaitTools, CallModel, Effect, Park, TakeNote
from controller_worker.memory.condensers.registry import create_condenser
from controller_worker.memory.view import ViewFold
from controller_worker.model.critic import parse_verdict
from tests.controller_parts import Core, answer, bash, call, finish, think

CLOSED = (AgentState.STOPPED, AgentState.ERROR)
MAX_ROUNDS = 400
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def agent_of(random: Random) -> AgentSpec:
    """Draw an agent."""
    options: dict[str, Any] = {
        "tool_concurrency": random.randint(1, 3),
        "enable_delegation": random.random() < 0.6,
        "enable_condensation_request": True,
        "condenser": random.choice([AmortizedForgettingCondenserSpec(max_size=12), ConversationWindowCondenserSpec()]),
    }
    if random.random() < 0.5:
        mode = random.choice(["always", "risky"])
        options["confirmation"] = ConfirmationPolicy(mode=mode, analyzer="shell", confirm_unknown=random.random() < 0.5)
    if random.random() < 0.6:
        ways = ["nudge", "switch_model", "restart", "park"]
        responses = tuple(random.choice(ways) for _ in range(random.randint(1, 3)))
        options["loop_policy"] = LoopPolicy(responses=responses, fallback_model="acme/larger", action_observation=2)
    if random.random() < 0.4:
        critic = CriticSpec() if random.random() < 0.6 else None
        options["goal"] = GoalSpec(check="true", critic=critic, max_refusals=random.randint(0, 2))
    if random.random() < 0.2:
        options["output"] = OutputSpec(json_schema=SCHEMA, max_corrections=random.randint(0, 2))
    if random.random() < 0.3:
        options["memory"] = MemorySpec(project="p")
    if random.random() < 0.2:
        options |= {"name": "PlanningAgent", "plan": PlanSpec(needs_approval=random.random() < 0.6)}
    return AgentSpec(**options)


class MixedHistory(Core):
    """A conversation with random behaviour of its model, tools, delegates and user."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.view = ViewFold()
        self.asked: tuple[int, bool] | None = None
        limits = Limits(
            max_iterations=self.random.choice([5, 30, 100]), max_budget_usd=self.random.choice([None, None, 5.0])
        )
        super().__init__("task", agent=agent_of(self.random), limits=limits, headless=self.random.random() < 0.5)

    def put(self, *events: Event) -> None:
        for event in events:
            super().put(event)
            self.view.add(self.events[-1])

    def run(self) -> Effect:
        """Do the shell's own work, and start a wanted model call."""
        for _ in range(MAX_ROUNDS):
            effect = super().run()
            done = self._done_by_shell(effect)
            if done is None:
                if isinstance(effect, CallModel) and self.asked is None:
                    self.asked = self.state.version, needs_verdict(self.state)
                return effect
            self.commit(done)
        raise AssertionError(f"no end to what is wanted at version {self.state.version}")

    def _done_by_shell(self, effect: Effect) -> Append | None:
        if isinstance(effect, TakeNote):
            asked = self.event(effect.action_id)
            metadata = asked.tool_call_metadata
            return Append((NoteObservation(content="Noted.", cause=asked.id, tool_call_metadata=metadata),))
        if isinstance(effect, AwaitDelegates):
            for delegate in self.state.delegation.delegates:
                if delegate.id in effect.delegate_ids and delegate.is_background:
                    text = STARTED.format(agent=delegate.agent, id=delegate.id)
                    return Append((to_answer(delegate, SuccessObservation(content=text)),), ((0, delegate.id),))
        if isinstance(effect, CallModel) and not needs_verdict(self.state) and self.asked is None:
            view = self.view.view(overflows=self.state.calls.overflows)
            condensed = create_condenser(self.state.setup.agent.condenser).condense(view)
            return Append((condensed,)) if isinstance(condensed, CondensationAction) else None
        return None

    def happen(self) -> None:
        """Let one event happen: most of the time, an awaited one."""
        state, random = self.state, self.random
        likely = [self.person_speaks, self.person_asks, self.person_recovers, self.time_passes, self.call_waits]
        if self.asked is not None:
            likely += [self.model_answers] * 9 + [self.call_fails]
        if self.unanswered():
            likely += [self.tool_answers] * 8
        if any(delegate.end is None and not delegate.refusal for delegate in state.delegation.delegates):
            likely += [self.delegate_ends] * 3
        if state.confirmation.asked_id is not None:
            likely += [self.person_answers] * 8
        if state.loops.found is not None:
            likely += [self.person_recovers] * 4
        if state.lifecycle.agent_state in (*CLOSED, AgentState.PAUSED):
            likely += [self.person_asks] * 6
        random.choice(likely)()
        if random.random() < 0.8:
            self.run()

    def unanswered(self) -> list[int]:
        """Return the actions of tool workers that are not answered."""
        settled = {event.cause for event in self.events if isinstance(event, Observation)}
        return [action_id for action_id in self.dispatched if action_id not in settled]

    def model_answers(self, *calls: ModelToolCall) -> None:
        assert self.asked is not None
        (seen_id, is_critic), self.asked = self.asked, None
        if self.state.lifecycle.agent_state in CLOSED:
            return
        if is_critic:
            verdict = "ACCEPTED" if calls else self.random.choice(["ACCEPTED", "REFUSED no"])
            reply = ModelReply(content=verdict, iteration=self.state.usage.iteration, seen_id=seen_id, service="critic")
            self.commit(Append((reply, parse_verdict(reply, finish_id=self.state.lifecycle.result_id))))
        else:
            text = self.random.choice(["", "I say this."])
            self.reply(*(calls or self._calls()), text=text, seen_id=seen_id)

    def _calls(self) -> list[ModelToolCall]:
        name = f"v{self.state.version}"
        if self.random.random() < 0.35:
            return [bash("ls", name)]
        delegate = {"agent": "Child", "task": self.random.choice(["look", "look", ""]), "join": "any"}
        task_list = {"command": "plan", "task_list": [{"title": "a"}]}
        drawn = [
            bash("rm -rf /", f"{name}a"),
            bash("pwd", f"{name}b"),
            think("hm", f"{name}c"),
            finish("done", f"{name}d"),
            call("finish", '{"message": "m", "output": {"a": 1}}', f"{name}e"),
            call("execute_bash", "{", f"{name}f"),
            call("delegate", json.dumps(delegate), f"{name}g"),
            call("delegate", json.dumps(delegate | {"background": True}), f"{name}h"),
            call("note", '{"command": "write", "text": "hi"}', f"{name}i"),
            call("task_tracker", json.dumps(task_list), f"{name}j"),
            call("request_condensation", "{}", f"{name}k"),
            call("propose_plan", '{"plan": "do it"}', f"{name}l"),
        ]
        return self.random.sample(drawn, self.random.choice([0, 1, 1, 1, 2, 3]))

    def call_fails(self) -> None:
        self.asked = None
        if self.state.lifecycle.agent_state not in CLOSED:
            code = self.random.choice(["rate_limit", "internal", "authentication", "context_window", "context_window"])
            is_final = code in ("authentication", "context_window") or self.random.random() < 0.2
            until = None if is_final else self.now + timedelta(seconds=8)
            failed = ModelCallFailed(code=code, last_error="no", attempt=self.state.calls.attempt + 1, retry_at=until)
            self.commit(Append((failed,)))

    def call_waits(self) -> None:
        if self.state.calls.deferral is not None:
            self.commit(Append((ModelCallAdmitted(),)))
        elif self.asked is not None and isinstance(self.wants(), CallModel):
            self.asked = None
            code = self.random.choice(["rate_limit", "waiting_for_budget"])
            self.commit(Append((ModelCallDeferred(code=code),)))

    def tool_answers(self) -> None:
        action = self.event(self.random.choice(self.unanswered()))
        failed = ErrorObservation(content="no", cause=action.id, tool_call_metadata=action.tool_call_metadata)
        self.put(failed if self.random.random() < 0.2 else answer(action))

    def delegate_ends(self) -> None:
        at_work = [one.id for one in self.state.delegation.delegates if one.end is None and not one.refusal]
        ended = AgentState.FINISHED
        self.put(
            DelegateEnded(
                delegate_id=self.random.choice(at_work),
                conversation_id="delegate",
                agent_state=ended,
                content="ok",
                outputs={},
                iterations=1,
            )
        )

    def person_speaks(self) -> None:
        self.say(f"m{self.state.version}")

    def person_asks(self) -> None:
        self.ask(self.random.choice(["running", "running", "running", "paused", "stopped", "finished"]))

    def person_answers(self) -> None:
        wanted = self.random.choice([AgentState.USER_CONFIRMED, AgentState.USER_CONFIRMED, AgentState.USER_REJECTED])
        edited = self.random.choice([{}, {}, {"command": "echo hi"}, {"bogus": 1}])
        about = self.random.choice([None, self.state.confirmation.asked_id, 3])
        self.put(ChangeAgentStateAction(agent_state=wanted, action_id=about, edited=edited, source=EventSource.USER))

    def person_recovers(self) -> None:
        self.put(LoopRecoveryAction(option=self.random.choice([1, 2, 3, 4]), source=EventSource.USER))

    def time_passes(self) -> None:
        self.pass_time(self.random.choice([1, 9, 100]))

    def come_to_rest(self) -> None:
        """Let every participant do the awaited work, until none is left."""
        for _ in range(MAX_ROUNDS):
            effect = self.run()
            if self.asked is not None:
                ends = call("finish", '{"message": "m", "output": {"a": 1}}', f"v{self.state.version}")
                plans = call("propose_plan", '{"plan": "do it"}', f"v{self.state.version}")
                self.model_answers(plans if self.state.setup.agent.name == "PlanningAgent" else ends)
            elif isinstance(effect, AwaitTools):
                self.put(answer(self.event(effect.action_ids[-1])))
            elif isinstance(effect, AwaitDelegates):
                self.delegate_ends()
            elif isinstance(effect, Park):
                self.now = effect.until
            elif isinstance(effect, CallModel):
                self.commit(Append((ModelCallAdmitted(),)))
            elif self.state.confirmation.asked_id is not None:
                confirmed = AgentState.USER_CONFIRMED
                self.put(ChangeAgentStateAction(agent_state=confirmed, source=EventSource.USER))
            else:
                return
        raise AssertionError("it does not come to rest")
