"""Notes on a real store: written by one conversation, recalled by the next, without secrets, once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from broker.contract.events import ConversationCreated, Event, LLMSpec
from broker.contract.notes import Note, NoteAction, NotebookKey, NoteObservation
from broker.contract.recall import RecallObservation
from broker.contract.specs import MemorySpec, Tenancy
from broker.coordination.notebooks import Notebooks
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.secrets.masking import MASK
from broker.secrets.secrets import Secrets
from controller_worker.core.effects import TakeNote
from controller_worker.loop.answers import answer_effect
from controller_worker.loop.replay import replay
from tests.controller_parts import said
from tests.conversation_hands import CID, Hands

BOOK = NotebookKey("acme", "ada", "engine")
SECRET = "c4n4ry-9f8e7d6c"


def noting(**arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": "note", "arguments": arguments}]}


def fields_of(hands: Hands) -> dict[str, Any]:
    memory = MemorySpec(user="ada", project="engine")
    return {"agent": hands.agent(memory=memory), "tenancy": Tenancy(tenant="acme")}


async def events_of(hands: Hands, conversation_id: str, task: str) -> list[Event]:
    """Run another conversation with the same notebook, whose model finishes at once."""
    (hands.folder / "other.json").write_text(json.dumps({"turns": []}))
    fields = fields_of(hands)
    llm = LLMSpec(model=f"scripted/{hands.folder / 'other.json'}")
    fields["agent"] = fields["agent"].model_copy(update={"llm": llm})
    await hands.log.create(ConversationCreated(conversation_id=conversation_id, **fields), [said(task)], key="begin")
    await hands.go(conversation_id)
    return await hands.log.read(conversation_id)


async def test_failed_recall_is_an_error_retried_with_next_message(hands: Hands) -> None:
    """B15: in the original it is never answered."""

    async def fail() -> None:
        raise ZeroDivisionError

    await hands.begin(**fields_of(hands))
    hands.wire.before["HGETALL"] = fail
    await hands.go()
    assert (await hands.events())[-1].wire()["agent_state"] == "error"
    await hands.say("again")
    await hands.go()
    events = await hands.events()
    assert events[-1].wire()["agent_state"] == "finished"
    assert find_violations(events, conversation_id=CID, is_strict=True) == []


async def test_next_conversation_recalls_notes(hands: Hands) -> None:
    await hands.begin(
        noting(command="write", text="Use make."),
        noting(command="write", text="Ask first.", keywords=["deploy"]),
        noting(command="list"),
        **fields_of(hands),
    )
    await hands.go()
    events = await hands.events()
    first, second, shown = (event for event in events if isinstance(event, NoteObservation))
    assert first.written is not None
    assert (first.content, first.written.conversation_id) == (f"Noted under the id {first.written.id}.", CID)
    assert shown.content.startswith("2 of at most 200 notes:\n")
    assert replay(events).divergence is None
    later = await events_of(hands, "conversation-2", "Deploy it")
    (recall,) = (event for event in later if isinstance(event, RecallObservation))
    assert recall.notes == (first.written, second.written)
    assert replay(later).divergence is None
    await Notebooks(hands.store).erase(BOOK)
    assert replay(await hands.log.read("conversation-2")).divergence is None
    (recall,) = (e for e in await events_of(hands, "conversation-3", "Deploy") if isinstance(e, RecallObservation))
    assert recall.notes is None


async def test_a_note_is_forgotten_and_replaced(hands: Hands) -> None:
    books = Notebooks(hands.store)
    for note_id in ("a", "b"):
        await books.write(BOOK, Note(id=note_id, text="old"))
    await hands.begin(
        noting(command="forget", id="a"),
        noting(command="forget", id="zz"),
        noting(command="write", id="b", text="new"),
        **fields_of(hands),
    )
    await hands.go()
    told = [event.content for event in await hands.events() if isinstance(event, NoteObservation)]
    assert told == ["The note a is forgotten.", "There is no note zz (any more).", "Noted under the id b."]
    assert [note.text for note in await books.read(BOOK)] == ["new"]


async def test_worker_dying_before_the_answer_writes_no_second_note(hands: Hands) -> None:
    await hands.begin(noting(command="write", text="Use make."), **fields_of(hands))
    loop = await hands.go()
    action = next(event for event in await hands.events() if isinstance(event, NoteAction))
    again = await answer_effect(
        hands.log, hands.services.notebooks, hands.services.hooks, loop.state, TakeNote(action.id)
    )
    told = next(event for event in await hands.events() if isinstance(event, NoteObservation))
    assert [event.model_copy(update={"id": told.id, "timestamp": told.timestamp}) for event in again.events] == [told]
    assert len(await Notebooks(hands.store).read(BOOK)) == 1


async def test_no_secret_reaches_a_notebook(hands: Hands) -> None:
    secrets = Secrets(hands.store, lambda: bytes(32))
    await secrets.put(CID, "TOKEN", SECRET)
    hands.log = EventLog(hands.store, secrets)
    hands.services = replace(hands.services, log=hands.log)
    await hands.begin(noting(command="write", text=f"The token is {SECRET}."), **fields_of(hands))
    await hands.go()
    (note,) = await Notebooks(hands.store).read(BOOK)
    assert note.text == f"The token is {MASK}."
