"""Random histories against an oracle of OpenHands' five patterns (2.1 to 2.3), which looks at the whole history.

Holds: the oracle is written over plain lists of tuples and uses no code of the detector; it is asked after each step.
Does not: draw what differs on purpose (polls, commands that sleep, refused calls, several calls in one reply).
"""

import os
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest

from broker.contract.actions import AgentThinkAction, CmdRunAction, CondensationAction, MessageAction, NullAction
from broker.contract.events import ConversationCreated, Event, EventSource, with_id
from broker.contract.observations import (
    AgentThinkObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    NullObservation,
)
from broker.contract.recall import RecallAction, RecallObservation, RecallType
from broker.contract.session_events import IPythonRunCellAction, IPythonRunCellObservation
from controller_worker.core.concerns.loops import find_current_loop
from controller_worker.core.controller import apply
from controller_worker.core.state import State
from tests.exploring import examples

TRAILER = "[Jupyter current working directory: /workspace]\n[Jupyter Python interpreter: /usr/bin/python3]"
SYNTAX_ERRORS = (
    "SyntaxError: unterminated string literal (detected at line 1)",
    "SyntaxError: invalid syntax. Perhaps you forgot a comma?",
    "SyntaxError: incomplete input",
    "NameError: name 'x' is not defined",
)


class Step(NamedTuple):
    """One event as the oracle knows it.

    Attributes:
        role: action, observation, message (of the agent), user, condensation or nothing.
        compared: the fields that the original compares; empty: it equals nothing, not even itself.
        is_error: an `ErrorObservation`.
        cell: the output of a cell.
    """

    role: str
    compared: tuple[object, ...] = ()
    is_error: bool = False
    cell: str | None = None


# The oracle


def expected(history: list[Step], *, headless: bool) -> str | None:
    """Return the pattern that the original finds in a history."""
    if not headless:
        for index in range(len(history) - 1, -1, -1):
            if history[index].role == "person":
                history = history[index + 1 :]
                break
    seen = [step for step in history if step.role not in ("person", "nothing")]
    if len(seen) < 3:
        return None
    actions = [step for step in seen if step.role in ("action", "message")]
    observations = [step for step in seen if step.role == "observation"]
    if len(actions) >= 4 and len(observations) >= 4 and is_one(actions[-4:]) and is_one(observations[-4:]):
        return "repeating_action_observation"
    if len(actions) >= 3 and len(observations) >= 3 and is_one(actions[-3:]) and are_errors(observations[-3:]):
        return "repeating_action_error"
    if is_monologue(seen):
        return "monologue"
    if len(actions) >= 6 and len(observations) >= 6 and alternate(actions[-6:]) and alternate(observations[-6:]):
        return "repeating_action_observation_pattern"
    places = [index for index, step in enumerate(seen) if step.role == "condensation"]
    if len(seen) >= 10 and len(places) >= 10 and any(after == before + 1 for before, after in pairwise(places[-10:])):
        return "context_window_error"
    return None


def is_one(steps: list[Step]) -> bool:
    return all(step.compared and step.compared == steps[0].compared for step in steps)


def alternate(steps: list[Step]) -> bool:
    return is_one(steps[0::2]) and is_one(steps[1::2])


def is_monologue(seen: list[Step]) -> bool:
    places = [index for index, step in enumerate(seen) if step.role == "message"][-3:]
    if len(places) < 3 or not is_one([seen[index] for index in places]):
        return False
    return all(step.role != "observation" for step in seen[places[0] : places[2]])


def are_errors(observations: list[Step]) -> bool:
    if all(step.is_error for step in observations):
        return True
    cells = [step.cell for step in observations if step.cell is not None]
    if len(cells) < 3:
        return False
    return is_same_unterminated(cells) or any(is_same_syntax_error(cells, text) for text in SYNTAX_ERRORS[1:3])


def is_same_unterminated(cells: list[str]) -> bool:
    found = []
    for cell in cells:
        lines = cell.strip().split("\n")
        if len(lines) < 3 or not has_trailer(lines):
            return False
        if "unterminated string literal (detected at line" in lines[-3]:
            found.append(lines[-3])
    return len(found) == 3 and len(set(found)) == 1


def is_same_syntax_error(cells: list[str], message: str) -> bool:
    found = []
    for cell in cells:
        lines = cell.strip().split("\n")
        if len(lines) < 6 or not lines[0].strip().startswith("Cell In[1], line") or not has_trailer(lines):
            continue
        if message.partition(": ")[2] in lines[-3]:
            found.append((lines[0], lines[-3]))
    return len(found) == 3 and len(set(found)) == 1


def has_trailer(lines: list[str]) -> bool:
    return lines[-2].startswith("[Jupyter current working directory:") and lines[-1].startswith(
        "[Jupyter Python interpreter:"
    )


# The generator: each piece is the sequence of events between two checks of the detector.

Piece = list[tuple[Event, Step]]


def command(draw: Random) -> Piece:
    text, thought = draw.choice(["ls", "pwd", "make"]), draw.choice(["", "", "", "hm"])
    hidden = draw.random() < 0.05
    action = CmdRunAction(command=text, thought=thought, hidden=hidden, timeout=draw.choice([None, 5.0]))
    known = Step("nothing") if hidden else Step("action", ("run", text, thought))
    if draw.random() < 0.3:
        content = draw.choice(["no", "never"])
        return [(action, known), (ErrorObservation(content=content), Step("observation", ("error", content), True))]
    code = draw.choice([0, 0, 1])
    output = CmdOutputObservation(
        command=text, content=str(draw.random()), hidden=hidden, metadata=CmdOutputMetadata(exit_code=code)
    )
    return [(action, known), (output, Step("nothing") if hidden else Step("observation", ("run", text, code)))]


def cell(draw: Random) -> Piece:
    code = draw.choice(["x = 'a", "f(x y)", "edit_file_by_replace(\n 'a',\n 'b',\n {n})", "edit_file_by_replace('a')"])
    code = code.replace("{n}", str(draw.randrange(9)))
    lines = code.split("\n")
    # An edit is compared by its first three lines, and a shorter one equals nothing.
    compared: tuple[object, ...] = ("cell", code)
    if "edit_file_by_replace(" in code:
        compared = ("cell", *lines[:3]) if len(lines) > 2 else ()
    first = draw.choice(["Cell In[1], line 1", "Cell In[1], line 1", "Cell In[1], line 2", "File x.py"])
    parts = [first, "    x = 'a", "        ^", draw.choice(SYNTAX_ERRORS), TRAILER]
    text = "\n".join(parts if draw.random() < 0.9 else parts[-2:])
    observation = IPythonRunCellObservation(content=text, code=code)
    return [
        (IPythonRunCellAction(code=code), Step("action", compared)),
        (observation, Step("observation", ("cell", code, text), cell=text)),
    ]


def thought(draw: Random) -> Piece:
    text = draw.choice(["hm", "so"])
    logged = AgentThinkObservation(content="Your thought has been logged.")
    return [
        (AgentThinkAction(thought=text), Step("action", ("think", text))),
        (logged, Step("observation", ("thought",))),
    ]


def message(draw: Random) -> Piece:
    text, waits = draw.choice(["Done.", "Shall I?"]), draw.random() < 0.8
    said = MessageAction(content=text, source=EventSource.AGENT, wait_for_response=waits)
    return [(said, Step("message", ("message", text, waits)))]


def person(draw: Random) -> Piece:
    text = draw.choice(["go", "on"])
    recall = RecallAction(recall_type=RecallType.KNOWLEDGE, query=text)
    piece: Piece = [
        (MessageAction(content=text, source=EventSource.USER), Step("person")),
        (recall, Step("action", ("recall", text))),
    ]
    if draw.random() < 0.7:
        return [*piece, (NullObservation(), Step("nothing"))]
    found = RecallObservation(recall_type=RecallType.KNOWLEDGE, content=text)
    return [*piece, (found, Step("observation", ("recall", text)))]


def condensation(draw: Random) -> Piece:
    forgotten = CondensationAction(forgotten_event_ids=(draw.randrange(1, 9),))
    return [(forgotten, Step("condensation"))]


def nothing(draw: Random) -> Piece:
    return [(NullAction(), Step("nothing"))]


KINDS: dict[Callable[[Random], Piece], int] = {
    command: 8,
    cell: 4,
    thought: 2,
    message: 5,
    person: 3,
    condensation: 3,
    nothing: 1,
}


def history_of(draw: Random) -> list[Piece]:
    """Return a history in which much is repeated: whole stretches, and single pieces with one of few changes."""
    kinds = draw.sample(list(KINDS), k=draw.randint(1, len(KINDS)))
    weights = [KINDS[kind] for kind in kinds]
    pieces: list[Piece] = []
    while len(pieces) < 40:
        if pieces and draw.random() < 0.45:
            length = draw.randint(1, min(4, len(pieces)))
            pieces += pieces[-length:] * draw.randint(1, 3)
        else:
            pieces.append(draw.choices(kinds, weights)[0](draw))
    return pieces


def difference(seed: int) -> str | None:
    """Return where the detector and the oracle disagree about the history of a seed; None: nowhere."""
    draw = Random(seed)
    headless = draw.random() < 0.5
    state = apply(State(), with_id(ConversationCreated(conversation_id="c", headless=headless), 1))
    history: list[Step] = []
    for piece in history_of(draw):
        cause = None
        for event, step in piece:
            source = EventSource.USER if step.role == "person" or isinstance(event, RecallAction) else EventSource.AGENT
            event_id = state.version + 1
            state = apply(state, with_id(event.model_copy(update={"cause": cause, "source": source}), event_id))
            cause = event_id if event.runnable else None
            history.append(step)
        found, wanted = find_current_loop(state), expected(history, headless=headless)
        if (found.loop_type if found else None) != wanted:
            return f"seed {seed}, {headless=}: {found} instead of {wanted} after {history}"
    return None


def disagreements(seeds: range) -> list[str]:
    return [found for seed in seeds if (found := difference(seed))]


def test_the_detector_and_the_oracle_agree() -> None:
    assert disagreements(range(examples(400))) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_detector_and_the_oracle_agree_in_20_000_histories() -> None:
    first = int(os.environ.get("SEED", "0")) * 20_000
    assert disagreements(range(first, first + 20_000)) == []
