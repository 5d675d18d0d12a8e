"""Scenarios of the controller's core, each one line: events, and expected effects.

A scenario is a list of moments, separated by commas. A moment is one step, or several joined by `&` that arrive before
the core decides again; `-> EFFECT` checks the wanted effect after it. Steps:

    bash, think, finish, text, NAME    the model replies with this call; `+` joins the calls of one reply, `bash(make)`
                                       gives the argument, `late` before them: the reply knew only the first six events
    paused, running, user_confirmed…   a user requests this state
    say, say(TEXT)                     a user's message
    ran, ran 8                         a tool worker answers the first pending action, or action 8
    fail CODE, fail CODE in 8          the wanted model call fails, for good or to be retried in 8 s
    wait 8                             8 seconds pass

Effects: `rest`, `start`, `model 2` (step 2), `model 2 try 3`, `tools 8 9`, `delegates 8`, `park CODE 8` (until 8 s).
Checks in the place of moments: `states running paused`, `code CODE` (nothing: there is no error), `dispatched 8`,
`pending 8`, `iteration 2`, `asked 8`, `trace N: LINE; LINE` (all events after event N).

Holds: after the last moment, continuing from a snapshot of any event leads to the same state.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import ModelToolCall
from controller_worker.core.effects import AwaitDelegates, AwaitStart, AwaitTools, CallModel, Effect, Park, Rest
from tests.controller_parts import START, Core, bash, call, check_snapshots, finish, think

Step = Callable[[Core], object]

CALLS: dict[str, Callable[..., ModelToolCall]] = {"bash": bash, "think": think, "finish": finish}
STATES = frozenset(AgentState)


def scenarios(table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Make a test of each entry: its name says the behaviour, its value is the argument `scenario`."""
    return pytest.mark.parametrize("scenario", [pytest.param(value, id=name) for name, value in table.items()])


def play(core: Core, scenario: str, **steps: Step) -> Core:
    """Let a conversation live through a scenario; `steps` are further steps by their names."""
    for moment in re.split(r", (?![^()]*\))", scenario):
        if is_check(core, moment):
            continue
        happens, _, wanted = moment.partition(" -> ")
        for step in happens.split(" & "):
            take(core, step, steps)
        effect = core.run()
        assert not wanted or describe(effect) == wanted, f"{moment}: {effect}"
    check_snapshots(core)
    return core


def is_check(core: Core, moment: str) -> bool:
    """Check what a moment claims; return whether it is a claim."""
    name, _, claimed = moment.partition(" ")
    state = core.state
    match name:
        case "states":
            assert " ".join(core.states()) == claimed
        case "code":
            assert state.lifecycle.error_code == claimed
            assert claimed or not state.lifecycle.last_error
        case "iteration":
            assert state.usage.iteration == int(claimed)
        case "asked":
            assert state.confirmation.asked_id == int(claimed)
        case "dispatched":
            assert " ".join(map(str, core.dispatched)) == claimed
        case "pending":
            assert " ".join(str(pending.id) for pending in state.tools.pending) == claimed
        case "trace":
            after, _, lines = claimed.partition(": ")
            assert core.trace(after=int(after)) == lines.split("; ")
        case _:
            return False
    return True


def take(core: Core, step: str, steps: Mapping[str, Step]) -> None:
    name, _, argument = step.partition(" ")
    if step in steps:
        steps[step](core)
    elif step in STATES:
        core.ask(step)
    elif said := re.fullmatch(r"say(?:\((.*)\))?", step):
        core.say(*filter(None, said.groups()))
    elif name == "ran":
        core.observe(int(argument) if argument else core.state.tools.pending[0].id)
    elif name == "wait":
        core.pass_time(float(argument))
    elif name == "fail":
        code, _, seconds = argument.partition(" in ")
        core.fail(code, retry_in=float(seconds) if seconds else None)
    else:
        written = step.removeprefix("late ")
        calls = [make_call(word, number) for number, word in enumerate(written.split("+"), 1) if word[:4] != "text"]
        text = "" if calls else written[5:-1] or "Which one?"
        core.reply(*calls, text=text, seen_id=6 if written != step else None)


def make_call(written: str, number: int) -> ModelToolCall:
    name, _, argument = written.partition("(")
    if name not in CALLS:
        return call(name, "{}", f"c{number}")
    return CALLS[name](*filter(None, [argument.removesuffix(")")]), call_id=f"c{number}")


def describe(effect: Effect) -> str:
    match effect:
        case Rest():
            return "rest"
        case AwaitStart():
            return "start"
        case CallModel(iteration, attempt):
            return f"model {iteration}" + (f" try {attempt}" if attempt > 1 else "")
        case AwaitTools(ids):
            return " ".join(["tools", *map(str, ids)])
        case AwaitDelegates(ids):
            return " ".join(["delegates", *map(str, ids)])
        case Park(until, reason):
            return f"park {reason} {(until - START).total_seconds():g}"
    return repr(effect)
