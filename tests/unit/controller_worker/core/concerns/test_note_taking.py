"""Notes in the core: the tool, the action that waits for the notebook, and the notes that a message recalls."""

import json
from typing import Any

import pytest

from broker.contract.events import AgentSpec, ModelToolCall, Observation
from broker.contract.notes import NOTE, Note, NoteAction, NoteObservation
from broker.contract.observations import ErrorObservation
from broker.contract.recall import RecallObservation
from broker.contract.specs import MemorySpec, Skill
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.read_only import ReadOnlyAgent
from controller_worker.core.effects import AwaitTools, CallModel, Rest, TakeNote
from controller_worker.loop.delegates import make_delegate_spec
from controller_worker.loop.replay import replay
from controller_worker.providers.messages.messages import TextPart
from tests.controller_parts import Core, bash, call, check_replay, messages_of, started
from tests.scenarios import play

MEMORY = AgentSpec(memory=MemorySpec(user="ada", project="engine"))
ALWAYS = Note(id="a", text="Use make.")
DEPLOY = Note(id="d", text="Ask before a deploy.", keywords=("deploy",))


def noting(call_id: str = "n1", **arguments: Any) -> ModelToolCall:
    return call("note", json.dumps(arguments), call_id)


def taken(core: Core, action_id: int) -> Any:
    """Let the notebook have done it."""
    metadata = core.event(action_id).tool_call_metadata
    answer: Observation = NoteObservation(content="Noted.", cause=action_id, tool_call_metadata=metadata)
    return core.append(answer)


def with_notes(*notes: Note, task: str = "task", spec: AgentSpec = MEMORY) -> Core:
    core = Core(task, agent=spec)
    core.notes = notes
    core.run()
    return core


def recalls(core: Core) -> list[tuple[Note, ...] | None]:
    return [event.notes for event in core.events if isinstance(event, RecallObservation)]


def prompt_of(core: Core) -> str:
    return "\n".join(
        part.text for message in messages_of(core.events) for part in message.content if isinstance(part, TextPart)
    )


def test_the_tool_is_offered_to_whoever_has_a_notebook() -> None:
    assert NOTE in CodeActAgent(MEMORY).tools
    assert NOTE not in CodeActAgent(AgentSpec()).tools
    assert NOTE not in ReadOnlyAgent(MEMORY).tools
    assert make_delegate_spec(MEMORY, "CodeActAgent").memory is None


def test_note_waits_for_the_notebook_and_step_for_note() -> None:
    core = with_notes()
    wanted = core.reply(noting(command="write", text=" Use make. ", keywords=["build", "build", ""]))
    action = core.event(-1, NoteAction)
    assert (action.text, action.keywords) == ("Use make.", ("build",))
    assert wanted == TakeNote(action.id)
    assert taken(core, action.id) == CallModel(2, 1)


def test_several_notes_and_a_command_of_one_turn() -> None:
    core = with_notes()
    first = core.reply(noting(command="list"), bash(), noting("n2", command="forget", id="x"))
    assert isinstance(first, TakeNote)
    second = taken(core, first.action_id)
    assert isinstance(second, TakeNote)
    assert first.action_id < second.action_id
    assert isinstance(taken(core, second.action_id), AwaitTools)
    play(core, "ran -> model 2")


def test_a_stop_leaves_no_note_without_an_answer() -> None:
    core = with_notes()
    wanted = core.reply(noting(command="list"))
    core.ask("stopped")
    assert core.run() == wanted
    assert taken(core, core.state.notes.pending[0].id) == Rest()
    assert core.state.notes.pending == ()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "command"),
        ({"command": "burn"}, "Unknown command 'burn'"),
        ({"command": "write"}, "text"),
        ({"command": "write", "text": " "}, "not 0"),
        ({"command": "write", "text": "x" * 1_001}, "not 1001"),
        ({"command": "write", "text": "x", "keywords": [1]}, "keywords"),
        ({"command": "write", "text": "x", "keywords": ["y" * 65]}, "64 characters"),
        ({"command": "forget"}, '"id"'),
    ],
)
def test_invalid_call_is_answered_at_once(arguments: dict[str, Any], complaint: str) -> None:
    core = with_notes()
    assert core.reply(noting(**arguments)) == CallModel(2, 1)
    error = core.event(-1, ErrorObservation)
    assert complaint in error.content


def test_first_message_recalls_permanent_notes_and_later_ones_mentions() -> None:
    core = with_notes(ALWAYS, DEPLOY)
    assert recalls(core) == [(ALWAYS,)]
    play(core, "text, say(Now deploy it), text, say(Just wait)")
    assert recalls(core) == [(ALWAYS,), (DEPLOY,)]
    shown = prompt_of(core)
    assert "- a: Use make." in shown
    assert "they are no orders" in shown


def test_a_note_is_shown_once_unless_it_was_replaced() -> None:
    core = with_notes(DEPLOY, task="deploy")
    for notes in ((DEPLOY,), (Note(id="d", text="Never deploy.", keywords=("deploy",)),)):
        core.notes = notes
        play(core, "text, say(deploy again)")
    assert len(recalls(core)) == 3
    shown = prompt_of(core)
    assert (shown.count("Ask before a deploy."), shown.count("Never deploy.")) == (1, 1)


def test_skills_are_recalled_beside_notes() -> None:
    spec = MEMORY.model_copy(update={"skills": (Skill(name="s", content="A skill.", triggers=("deploy",)),)})
    core = with_notes(DEPLOY, task="deploy", spec=spec)
    assert "A skill." in prompt_of(core)
    assert "Ask before a deploy." in prompt_of(core)


def test_without_a_notebook_nothing_is_read_and_nothing_recalled() -> None:
    core = started()
    assert recalls(core) == [None]
    assert "notes" not in core.events[-1].wire()


def test_the_log_is_decided_again_offline_without_the_notebook() -> None:
    core = with_notes(ALWAYS, DEPLOY)
    wanted = core.reply(noting(command="write", text="x"))
    assert isinstance(wanted, TakeNote)
    taken(core, wanted.action_id)
    play(core, "text, say(deploy)")
    check_replay(core)
    # The recall of "deploy" may not have found a note that no word calls up.
    (found_deploy,) = [e for e in core.events if isinstance(e, RecallObservation) and e.notes == (DEPLOY,)]
    forged = found_deploy.model_copy(update={"notes": (ALWAYS,)})
    assert replay([forged if event is found_deploy else event for event in core.events]).divergence is not None
