"""`Conversation` on a private cluster, as a program that knows nothing else uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from broker.runtime.errors import UsageError
from deckhands import CommandFailed, ConfirmationPolicy, Conversation, ConversationFailed, Event, Limits, NotBegun
from tests.integration.command_line import run_command
from tests.turns import finish, script

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 200
LIMIT = 120.0


class Verdict(BaseModel):
    is_good: bool


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("DECKHANDS_URL", "LLM_MODEL", "LLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DECKHANDS_SANDBOX", "none")
    return tmp_path / "home"


def test_one_conversation_from_its_first_message_to_its_record(home: Path, tmp_path: Path) -> None:
    """All that `test_conversation_places.py` does not do in each place; a private cluster is started once."""
    verdict = finish("Good.", output={"is_good": True})
    turns = run_command("echo one > one.txt"), verdict, run_command("echo two > two.txt"), verdict
    model = script(tmp_path / "model.json", *turns)
    seen: list[Event] = []
    conversation = Conversation(model=model, output=Verdict, callbacks=[seen.append], secrets={"TOKEN": "tip-top-9"})
    with conversation:
        with pytest.raises(NotBegun):
            conversation.state()
        conversation.send_message("Look at this", images=[PNG])
        outcome = conversation.run(timeout_seconds=LIMIT)
        assert outcome.output == Verdict(is_good=True)
        assert [event.id for event in seen] == list(range(1, outcome.summary.last_event_id + 1))
        assert conversation.files.read("one.txt") == b"one\n"
        conversation.files.write("a/b.txt", "here")
        done = conversation.execute('cat a/b.txt; echo " $TOKEN"; (exit 3)', by="ann", reason="a look")
        assert (done.output.split(), done.exit_code) == (["here", "<secret_hidden>"], 3)
        assert conversation.execute("sleep 600", timeout_seconds=0.2).exit_code == -1
        conversation.set_confirmation_policy(ConfirmationPolicy(mode="always"), by="ann", reason="be careful")
        assert conversation.run("Now the second", timeout_seconds=LIMIT).state == "awaiting_user_confirmation"
        conversation.reject(reason="Not two.")
        assert conversation.wait(timeout_seconds=LIMIT).state == "finished"
        assert [(entry.name, entry.kind) for entry in conversation.files.list()] == [
            ("a", "directory"),
            ("one.txt", "file"),
        ]
        assert len(seen) == len(conversation.events())
        conversation.set_limits(Limits(max_iterations=1))
        with pytest.raises(ConversationFailed) as raised:
            conversation.run("And more", timeout_seconds=LIMIT)
        assert raised.value.code == "max_iterations"
        conversation.close()
        with pytest.raises((UsageError, CommandFailed)):
            conversation.execute("ls")
    summary = json.loads((home / "runs" / conversation.id / "summary.json").read_text())
    assert summary["state"] == "error"
    with pytest.raises(UsageError, match="disconnected"):
        conversation.state()


def test_stream_and_continuation_by_a_second_object(home: Path, tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("ls"), finish("Done."), finish("Again."))
    with Conversation(model=model) as conversation:
        streamed = [item.kind for item in conversation.stream("Look", deltas=False)]  # type: ignore[union-attr]
        assert streamed[0] == "conversation.created"
        assert streamed[-1] == "observation.agent_state_changed"
        cid = conversation.id
    with Conversation(conversation_id=cid) as again:
        assert again.state().message == "Done."
        again.set_labels({"round": "2"})
        items = list(again.stream("Once more", after=0, deltas=True))
        ids = [item.id for item in items if isinstance(item, Event)]
        assert ids == list(range(1, again.state().last_event_id + 1))  # everything is new for a second object
        assert again.wait(timeout_seconds=LIMIT).message == "Again."


def test_callback_may_call_the_conversation_and_its_errors_propagate(home: Path, tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("ls"), finish("Done."))

    def look(event: Event) -> None:
        if event.kind == "action.run":
            states.append(conversation.state().state)
        if event.kind == "action.finish":
            raise RuntimeError("enough")

    states: list[str] = []
    with Conversation(model=model, callbacks=[look]) as conversation:
        with pytest.raises(RuntimeError, match="enough"):
            conversation.run("Look", timeout_seconds=LIMIT)
        assert len(states) == 1
        assert conversation.wait(timeout_seconds=LIMIT).state == "finished"
