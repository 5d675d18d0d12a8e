"""Our side of the Agent Client Protocol, against agents with arbitrary output: their model is not trusted."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from typing import Any

import pytest

from tool_worker.host.acp.acp_program import AcpProgram
from tool_worker.host.acp.client_requests import ClientRequests
from tool_worker.host.acp.running_agent import AgentLost
from tool_worker.host.acp.session import UNREADABLE_LIMIT, AcpSession

SESSION = "session-1"


class Line:
    """A session whose agent is the test."""

    def __init__(self, wanted: str = "") -> None:
        self.sent: list[dict[str, Any]] = []
        self.session = AcpSession(self.sent.append, ClientRequests({}, "/"), "/", wanted)

    def says(self, **message: Any) -> None:
        self.session.process_line(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def answers(self, **result: Any) -> None:
        """Answer the latest request."""
        number = max(message["id"] for message in self.sent if "method" in message and "id" in message)
        self.says(id=number, result=result)

    def updates(self, kind: str, /, **fields: Any) -> None:
        self.says(method="session/update", params={"sessionId": SESSION, "update": {"sessionUpdate": kind, **fields}})

    def asks(self, number: Any, **call: Any) -> None:
        params = {"sessionId": SESSION, "toolCall": call, "options": [{"optionId": "y", "kind": "allow_once"}]}
        self.says(id=number, method="session/request_permission", params=params)


@pytest.fixture
def line() -> Line:
    """An agent at work."""
    line = Line()
    line.session.prompt("do it")
    line.answers(protocolVersion=1, agentInfo={"name": "a", "version": "1"})
    line.answers(sessionId=SESSION)
    assert line.sent[-1]["method"] == "session/prompt"
    return line


def test_a_turn_ends_with_its_reason_and_usage(line: Line) -> None:
    line.updates("agent_message_chunk", content={"type": "text", "text": "Hi"})
    line.answers(stopReason="end_turn", usage={"inputTokens": 3, "cachedReadTokens": 4, "outputTokens": 5})
    report = line.session.render_report()
    assert (line.session.outcome, report["stop_reason"], report["content"]) == ("ended", "end_turn", "Hi")
    assert (report["usage"]["prompt_tokens"], report["usage"]["completion_tokens"]) == (7, 5)


@pytest.mark.parametrize(
    "said",
    [
        b"a log line",
        b"[1, 2]",
        b"null",
        b'{"id": 9999, "result": {}}',
        b'{"id": true, "result": {}}',
        b'{"id": {}, "method": "x", "params": {}}',
        b'{"id": 1e999, "method": "x"}',
        b'{"id": ' + b"9" * 5000 + b', "method": "x"}',
        b'{"method": "session/update", "params": {"sessionId": "other", "update": {"sessionUpdate": "plan"}}}',
        b'{"method": "session/update", "params": [1]}',
        b'{"method": "session/update", "params": {"sessionId": "session-1", "update": {"sessionUpdate": {}}}}',
        b'{"method": "unknown/notice"}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"x": NaN}',
        b"",
    ],
)
def test_nonsense_changes_nothing(line: Line, said: bytes) -> None:
    before = len(line.sent)
    line.session.process_line(said)
    assert len(line.sent) == before
    assert line.session.outcome == ""
    line.answers(stopReason="end_turn")
    assert line.session.outcome == "ended"


def test_too_much_nonsense_is_no_agent(line: Line) -> None:
    for _ in range(UNREADABLE_LIMIT):
        line.session.process_line(b"nonsense")
    with pytest.raises(AgentLost) as lost:
        line.session.process_line(b"nonsense")
    assert lost.value.code == "malformed_reply"


def test_an_answer_counts_once(line: Line) -> None:
    number = line.sent[-1]["id"]
    line.says(id=number, result={"stopReason": "end_turn"})
    line.session.start_report()
    line.says(id=number, result={"stopReason": "refusal"})
    assert line.session.outcome == ""


def test_call_is_reported_once_with_its_bounded_diff(line: Line) -> None:
    line.updates(
        "tool_call", toolCallId="c", title="Edit", kind="edit", rawInput={"deep": json.loads("[" * 90 + "]" * 90)}
    )
    diff = {"type": "diff", "path": "/x", "oldText": "a", "newText": "b" * 10**5}
    line.updates("tool_call_update", toolCallId="c", status="completed", content=[diff] * 100)
    report = line.session.render_report()
    assert line.session.outcome == "working"
    assert report["call"]["arguments"] == {"input": "[nested too deep]"}
    assert len(json.dumps(report)) < 2_000_000
    line.session.start_report()
    line.updates("tool_call_update", toolCallId="c", status="failed")
    assert line.session.outcome == ""


def test_questions_are_answered_once_and_ids_are_not_used_twice(line: Line) -> None:
    line.asks(5, toolCallId="c", title="Remove", rawInput={"command": "rm x"})
    report = line.session.render_report()
    assert report["permission"]["call"]["arguments"] == {"command": "rm x"}
    line.asks(5, toolCallId="c")  # the same number: an answer would be ambiguous
    assert "error" in line.sent[-1]
    before = len(line.sent)
    line.session.answer(report["permission"]["number"], "y")
    line.session.answer(report["permission"]["number"], "y")
    line.session.answer(99, "y")
    assert line.sent[before:] == [{"id": 5, "result": {"outcome": {"outcome": "selected", "optionId": "y"}}}]


def test_a_cancelled_turn_answers_what_was_asked(line: Line) -> None:
    line.asks("q", toolCallId="c")
    line.session.cancel()
    assert line.sent[-2]["method"] == "session/cancel"
    assert line.sent[-1] == {"id": "q", "result": {"outcome": {"outcome": "cancelled"}}}


def test_a_question_outside_a_turn_is_refused(line: Line) -> None:
    line.answers(stopReason="end_turn")
    line.session.start_report()
    line.asks(5, toolCallId="c")
    assert "error" in line.sent[-1]
    assert line.session.outcome == ""


def test_unknown_methods_are_answered_as_such(line: Line) -> None:
    line.says(id=1, method="elicitation/create", params={})
    assert line.sent[-1]["error"]["code"] == -32601


def test_a_flood_of_updates_ends_in_reports_of_bounded_size(line: Line) -> None:
    for _ in range(3):
        line.session.start_report()
        count = 0
        while not line.session.outcome:
            line.updates("agent_thought_chunk", content={"type": "text", "text": "x" * 1000})
            count += 1
        assert count < 100
        assert len(json.dumps(line.session.render_report())) < 100_000
    line.session.start_report()
    count = 0
    while not line.session.outcome:
        line.updates("current_mode_update", modeId="x")
        count += 1
    assert count <= 5000


def test_an_agent_without_its_login_says_so() -> None:
    line = Line()
    line.answers(protocolVersion=1)
    with pytest.raises(AgentLost) as lost:
        line.says(id=2, error={"code": -32000, "message": "Authentication required"})
    assert lost.value.code == "authentication"


@pytest.mark.parametrize("version", [2, "1", None, {}])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(AgentLost):
        Line().answers(protocolVersion=version)


@pytest.mark.parametrize("session_id", ["", "x" * 1000, 5, None])
def test_a_session_without_a_usable_id_is_refused(session_id: Any) -> None:
    line = Line()
    line.answers(protocolVersion=1)
    with pytest.raises(AgentLost):
        line.answers(sessionId=session_id)


def test_session_is_loaded_if_possible_without_reporting_its_replay() -> None:
    line = Line(SESSION)
    line.session.prompt("again")
    line.answers(protocolVersion=1, agentCapabilities={"loadSession": True})
    assert line.sent[-1]["method"] == "session/load"
    line.updates("agent_message_chunk", content={"type": "text", "text": "old"})
    line.answers()
    assert line.sent[-1]["method"] == "session/prompt"
    assert line.session.render_report()["content"] == ""


def test_a_session_that_cannot_be_loaded_is_lost() -> None:
    line = Line(SESSION)
    line.answers(protocolVersion=1)
    assert line.session.outcome == "lost"
    other = Line(SESSION)
    other.answers(protocolVersion=1, agentCapabilities={"loadSession": True})
    other.says(id=2, error={"code": -32602, "message": "no such session"})
    assert other.session.outcome == "lost"


def test_random_messages_never_break_the_session() -> None:
    seeded = random.Random(2026)
    values: list[Any] = [
        None,
        True,
        -1,
        2**70,
        1.5,
        "",
        "x",
        [],
        [1],
        {},
        {"type": "diff"},
        {"text": 5},
        [{"path": []}],
    ]
    names = [
        *("toolCallId", "status", "title", "kind", "content", "rawInput", "rawOutput", "locations", "entries"),
        "cost",
    ]
    kinds = ["agent_message_chunk", "agent_thought_chunk", "plan", "tool_call", "tool_call_update", "usage_update", "x"]
    line = Line()
    line.session.prompt("do it")
    line.answers(protocolVersion=1)
    line.answers(sessionId=SESSION)
    for _ in range(3000):
        line.session.start_report()
        fields = {name: seeded.choice(values) for name in seeded.sample(names, 5)}
        fields |= {"toolCallId": "c"} if seeded.random() < 0.5 else {}
        line.updates(seeded.choice(kinds), **fields)
        if seeded.random() < 0.2:
            line.asks(seeded.choice(values), **fields)
        json.dumps(line.session.render_report())
    assert len(line.session._calls) <= 256


def test_where_no_agent_runs_nothing_is_done_between_two_calls() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = threading.Thread(target=AcpProgram(theirs, rest_seconds=0.01).run)
        program.start()
        ours.sendall(json.dumps({"call": 1, "arguments": {"permission": 3}}).encode() + b"\n")
        assert json.loads(ours.recv(65536))["result"]["report"]["state"] == "lost"
        assert program.ident is not None
        used = time.pthread_getcpuclockid(program.ident)
        before = time.clock_gettime(used)
        program.join(0.5)
        after = time.clock_gettime(used)
        ours.shutdown(socket.SHUT_WR)
        program.join()
    assert after - before < 0.02
