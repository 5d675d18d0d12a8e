"""The summary of a log and the exit code that follows from it."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from broker.contract.actions import (
    AgentFinishAction,
    AgentRejectAction,
    MessageAction,
)
from broker.contract.error_texts import ERROR_KEYS, REMEDIES
from broker.contract.events import ConversationCreated, ModelCallFailed, ModelReply, TokenUsage
from broker.contract.observations import AgentStateChangedObservation, CmdOutputObservation
from deckhands.client.conversation.outcome import ConversationFailed, Outcome
from deckhands.client.forking import build_fork
from deckhands.client.reading.metrics import Metrics
from deckhands.client.reading.output import UNCONFINED, render_summary
from deckhands.client.reading.summary import Summary, summarize
from tests.source_code import ROOT
from tests.unit.deckhands.sample_log import created, finished_log, numbered, reply, state, user


def test_a_finished_conversation_in_numbers():
    found = summarize(finished_log()).as_json()
    assert found.pop("metrics")["accumulated_cost"] == 0.5
    assert found == {
        "summary": True,
        "conversation_id": "c1-sample",
        "state": "finished",
        "iterations": 2,
        "cost_usd": 0.5,
        "prompt_tokens": 2200,
        "completion_tokens": 80,
        "duration_seconds": 10.0,
        "last_event_id": 11,
        "has_unknown_cost": False,
        "title": "Fix it",
        "agent": "CodeActAgent",
        "model": "acme/large",
        "workspace": "/srv/project",
        "started": "2026-05-01T12:00:00+00:00",
        "updated": "2026-05-01T12:00:10+00:00",
        "last_error": "",
        "error_code": "",
        "error_detail": "",
        "remedy": "",
        "message": "All tests pass.",
        "outputs": {},
        "asked_id": None,
        "sandbox": "auto",
        "estimated_calls": 0,
        "labels": {},
        "has_ipython": False,
        "delegates": {},
        "not_before": None,
        "expires": None,
    }


def test_every_documented_figure_is_in_the_summary():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[^|]+) \| ([^|]+) \|$", page.partition("## The summary")[2].partition("\n## ")[0], re.MULTILINE
    )
    found = summarize(finished_log()).as_json()
    documented = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == found.keys()
    (text,) = [text for names, text in rows if names == "`metrics`"]
    figures = set(re.findall(r"`(\w+)`", text)) - found.keys()
    assert len(figures) == 8
    assert figures <= found["metrics"].keys()


def test_that_there_is_no_sandbox_is_said():
    first, *rest = finished_log()
    assert isinstance(first, ConversationCreated)
    for sandbox, said in {"none": [f"Sandbox:      {UNCONFINED}"], "bwrap": []}.items():
        workspace = first.workspace.model_copy(update={"sandbox": sandbox})
        summary = summarize([first.model_copy(update={"workspace": workspace}), *rest])
        assert [line for line in render_summary(summary) if line.startswith("Sandbox")] == said


def test_that_the_provider_counted_nothing_is_said():
    usage = TokenUsage(prompt_tokens=100, completion_tokens=10)
    events = numbered(
        created(), *[ModelReply(usage=usage, cost_usd=0.5, is_usage_estimated=found) for found in (True, None)]
    )
    summary = summarize(events)
    assert summary.estimated_calls == 1
    said = next(line for line in render_summary(summary) if line.startswith("Cost:"))
    assert said == "Cost:         $1.0000; estimated for 1 call without token counts from the provider"


def test_unsandboxed_runs_are_reported_whatever_was_requested():
    ran = CmdOutputObservation(command="true", unsandboxed=True)
    assert [summarize(numbered(created(), *then)).sandbox for then in ([ran], [])] == ["none", "auto"]


def test_the_summary_of_an_earlier_version_has_no_metrics():
    fields = summarize(finished_log()).as_json()
    del fields["metrics"], fields["outputs"]
    assert (Summary.from_json(fields).metrics, Summary.from_json(fields).outputs) == (Metrics(), {})


def test_output_counts_only_if_the_finish_does():
    done = AgentFinishAction(outputs={"total": 3})
    assert summarize(numbered(created(), reply(), done, state("finished"))).outputs == {"total": 3}
    assert summarize(numbered(created(), reply(), done)).outputs == {}
    assert summarize(numbered(created(), reply(), done, state("error", "no"))).outputs == {}


def test_the_last_error_is_that_of_the_state():
    failed = ModelCallFailed(code="authentication", content="401", last_error="AuthenticationError: wrong key")
    summary = summarize(numbered(created(), user("go"), failed, state("error", "STATUS$ERROR_LLM_AUTHENTICATION")))
    assert summary.last_error == "The model's provider refused the API key: 401"
    assert (summary.error_code, summary.error_detail, summary.remedy) == ("authentication", "401", "Check LLM_API_KEY.")


@pytest.mark.parametrize("key", [*ERROR_KEYS, "STATUS$SOMETHING_NEW"])
def test_error_keys_become_sentences_with_remedies(key):
    imported = summarize(numbered(created(), user("go"), state("error", key)))
    lines = render_summary(imported)
    assert imported.last_error.endswith(".")
    assert "$" not in "".join(line for line in lines if line.startswith("State"))
    failure = ConversationFailed(Outcome(imported))
    assert "$" not in str(failure)
    (paragraph,) = state("error", key).paragraphs
    assert "$" not in paragraph.text + state("error", key).sentence
    code = ERROR_KEYS.get(key, ("", ""))[1]
    assert (imported.remedy, imported.as_json()["remedy"]) == (REMEDIES.get(code, ""), REMEDIES.get(code, ""))
    assert paragraph.text.startswith(imported.last_error)
    assert len(paragraph.text) > len(imported.last_error)


def test_an_error_without_a_reason_shows_the_failed_call():
    failed = ModelCallFailed(code="not_found", content="no such model", last_error="NotFoundError: no such model")
    assert summarize(numbered(created(), failed, state("error"))).last_error == "NotFoundError: no such model"


@pytest.mark.parametrize("code", ["max_iterations", "stuck_in_loop", "goal_not_reached", "output_not_valid"])
def test_error_without_a_failed_call_has_its_code(code):
    ended = AgentStateChangedObservation(agent_state="error", reason="Oops: no", code=code)
    assert summarize(numbered(created(), reply(), ended)).error_code == code
    assert summarize(numbered(created(), reply(), ended, state("running"))).error_code == ""


def test_a_reply_makes_up_for_a_failed_call():
    failed = ModelCallFailed(code="rate_limit", last_error="RateLimitError: slow down")
    assert summarize(numbered(created(), failed)).last_error == "RateLimitError: slow down"
    made_up_for = summarize(numbered(created(), failed, reply()))
    assert (made_up_for.last_error, made_up_for.error_code, made_up_for.remedy) == ("", "", "")


@pytest.mark.parametrize(
    ("name", "reason", "code"),
    [
        ("finished", "", 0),
        ("error", "AuthenticationError: wrong key", 1),
        ("error", "RuntimeError: Agent reached maximum iteration. Current iteration: 3, max iteration: 3", 6),
        ("error", "RuntimeError: Agent reached maximum budget for conversation. Current budget: 1.00", 6),
        ("rejected", "", 3),
        ("awaiting_user_input", "", 5),
        ("awaiting_user_confirmation", "", 5),
        ("paused", "", 5),
        ("stopped", "", 130),
    ],
)
def test_exit_codes(name, reason, code):
    assert summarize(numbered(created(), state(name, reason))).exit_code == code


def test_the_message_is_what_the_agent_said_last():
    asked = numbered(created(), user("hi"), MessageAction(content="Which one?", source="agent"))
    assert summarize(asked).message == "Which one?"
    rejected = numbered(created(), AgentRejectAction(outputs={"reason": "It would delete data."}))
    assert summarize(rejected).message == "It would delete data."


def test_a_forks_duration_does_not_count_its_origins_time():
    origin = finished_log()
    begun = origin[-1].timestamp + timedelta(hours=2)
    fork = [numbered(build_fork(origin, "fork"))[0].model_copy(update={"timestamp": begun}), *origin[1:]]
    found = summarize(fork)
    assert (found.duration_seconds, found.started, found.updated) == (0.0, begun, begun)
    later = user("more").model_copy(update={"id": len(fork) + 1, "timestamp": begun + timedelta(seconds=5)})
    assert summarize([*fork, later]).duration_seconds == 5.0
