"""An agent's words and actions as clients show them: each word once and in order, even if pieces are lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import with_id
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from deckhands.server.protocols.answer_text import AnswerText
from deckhands.server.protocols.editor_updates import SessionUpdates


def piece(text: str, at: int | None = 0, call: str = "1.1", kind: str = "text") -> dict[str, Any]:
    return {"call": call, "kind": kind, "text": text, "at": at}


def reply(content: str = "", finish: str | None = None, step: int = 1) -> dict[str, Any]:
    arguments = json.dumps({"message": finish})
    calls = [{"id": "1", "name": "finish", "arguments": arguments}] if finish is not None else []
    return {"kind": "model.reply", "content": content, "tool_calls": calls, "iteration": step}


@pytest.mark.parametrize(
    ("pieces", "said", "written", "rest"),
    [
        ([piece("Good "), piece("day.", 5)], ["Good ", "day."], reply("Good day."), ""),
        (
            [piece("Good "), piece("all!", 10), piece("x", 14)],
            ["Good ", "", ""],
            reply("Good day, all!x"),
            "day, all!x",
        ),
        ([piece('finish {"message": "done"', 4, kind="call")], [""], reply("So. ", "done"), "So. \n\ndone"),
        ([piece("Hm.", kind="thinking"), piece("Good", 3)], ["", "Good"], reply("Good"), ""),
        ([piece("day.", 3)], [""], reply("Good day."), "Good day."),
        ([piece("day.", None)], [""], reply("Good day."), "Good day."),
        (
            [piece("Good "), piece("Go"), piece("od day", 2), piece(".", 8)],
            ["Good ", "", "day", "."],
            reply("Good day."),
            "",
        ),
        (
            [piece("Good "), piece("Good day", call="1.2"), piece("Bad", call="1.2.1"), piece(" day", 3, call="1.2.1")],
            ["Good ", "day", "", ""],
            reply("Bad day"),
            "\n\nBad day",
        ),
    ],
    ids=[
        "words come at once",
        "rest after a lost piece",
        "text lost whole",
        "thinking is not said",
        "piece without a start",
        "piece without a position",
        "same call by another worker",
        "equal attempt, then a different one",
    ],
)
def test_pieces_and_their_reply_say_each_word_once(
    pieces: list[dict[str, Any]], said: list[str], written: dict[str, Any], rest: str
) -> None:
    spoken = AnswerText()
    assert [spoken.add_piece(each) for each in pieces] == said
    assert spoken.add_reply(written) == rest


def test_finish_message_streams_as_written_behind_the_text() -> None:
    spoken, call = AnswerText(), 'finish {"message": "All \\"done\\" \\ud83d\\ude00\\n.", "output": {}}'
    found = spoken.add_piece(piece("So. "))
    steps = [spoken.add_piece(piece(letter, at, kind="call")) for at, letter in enumerate(call, 4)]
    assert found + "".join(steps) == 'So. \n\nAll "done" 😀\n.'
    assert max(map(len, steps)) <= 3  # the blank line comes with the first letter
    assert spoken.add_reply(reply("So.", 'All "done" 😀\n.')) == ""
    assert spoken.finish('All "done" 😀\n.') == ""


@pytest.mark.parametrize(
    "call",
    ['run {"message": "x"}', 'finish {"output": {"message": "x"}, "message": "y"}', "finish [", "finish", "\nfinish {"],
)
def test_what_is_no_message_of_a_finish_is_not_said(call: str) -> None:
    assert AnswerText().add_piece(piece(call, kind="call")) == ""


def test_replies_are_apart_and_the_last_is_the_answer() -> None:
    spoken = AnswerText()
    said = spoken.add_piece(piece("I look.")) + spoken.add_reply(reply("I look."))
    said += spoken.add_piece(piece("late", 7)) + spoken.add_reply({**reply("no step"), "service": "condenser"})
    said += spoken.add_piece(piece("Two ", call="2.1")) + spoken.add_reply(reply("Two files.", step=2))
    assert said + spoken.finish("Two files.") == "I look.\n\nTwo files."


def test_an_answer_that_was_no_reply_follows() -> None:
    spoken = AnswerText()
    said = spoken.add_reply(reply("I look.")) + spoken.finish("look.")
    assert said == "I look.\n\nlook."
    assert AnswerText().finish("It has ended.") == "It has ended."


def test_pieces_of_earlier_turns_are_not_said_again() -> None:
    spoken = AnswerText(step=4)
    assert spoken.add_piece(piece("old", call="3.1")) == ""
    assert spoken.add_piece(piece("new", call="4.1")) == "new"


@pytest.mark.parametrize("call", ["", "x", "-1.1", "1", "1" * 5_000 + ".1", "99.1"])
def test_pieces_of_no_call_are_not_said(call: str) -> None:
    assert AnswerText().add_piece(piece("x", call=call)) == ""


def cut(draw: random.Random, text: str) -> list[tuple[int, str]]:
    """A text in pieces, with their places."""
    places = sorted({0, *(draw.randrange(len(text)) for _ in range(4))})
    return [(a, text[a:b]) for a, b in zip(places, [*places[1:], len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_each_word_appears_once_despite_loss_repetition_or_delay(seed: int) -> None:
    draw, said, whole = random.Random(seed), "", []
    spoken, pending = AnswerText(), list[dict[str, Any]]()
    for step in range(1, 5):
        text, finish = f"words of {step} 你 ", f'the "end" \\ of\n{step}'
        call = f"finish {json.dumps({'message': finish})}"
        sent = [piece(part, at, f"{step}.1") for at, part in cut(draw, text)]
        sent += [piece(part, len(text) + at, f"{step}.1", "call") for at, part in cut(draw, call)]
        if draw.random() < 0.3:
            sent = sent[: draw.randrange(len(sent))] + sent  # the worker was killed, and another one asked again
        pending += [one for one in sent if draw.random() > 0.1]
        late = draw.randrange(len(pending) + 1)
        said += "".join(map(spoken.add_piece, pending[:late])) + spoken.add_reply(reply(text.strip(), finish, step))
        pending = pending[late:]
        whole.append(f"{text.strip()}\n\n{finish}")
    said += spoken.finish(finish)
    assert " ".join(said.split()) == " ".join("\n\n".join(whole).split())


def test_editor_reads_why_a_command_has_no_end() -> None:
    updates = SessionUpdates()
    updates.of(with_id(CmdRunAction(command="sleep 9"), 3))
    suffix = "\n[The command timed out after 5 seconds. You may wait longer to see more.]"
    metadata = CmdOutputMetadata(suffix=suffix)
    (update,) = updates.of(CmdOutputObservation(command="sleep 9", content="1", metadata=metadata, cause=3))
    assert update.content[0].content.text == "1\nThe command timed out after 5 seconds."
