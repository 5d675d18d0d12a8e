"""From facts to links: every reason to wait has an explanation, and each says what is known and no more."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, ChangeAgentStateAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import (
    Action,
    ConfirmationStatus,
    ConversationCreated,
    Event,
    EventSource,
    ModelCallDeferred,
    ModelCallFailed,
    OperatorActed,
    with_id,
)
from broker.contract.observations import AgentStateChangedObservation
from broker.limits.ledger import BudgetAccount
from broker.log.conversations import ConversationRow, Takeover
from broker.log.selection import WaitReason
from broker.runtime.ids import make_delegate_id
from controller_worker.core import commit
from controller_worker.core.concerns import model_calls
from controller_worker.providers.errors import MODEL_ERRORS
from deckhands.cli.commands.why import lines_of
from deckhands.client.reasons.chain import EXPLANATIONS, explain
from deckhands.client.reasons.facts import (
    ActionFact,
    BudgetFact,
    ConversationFacts,
    NodeFact,
    QueuePosition,
    QuotaFact,
    WorkerFact,
)
from deckhands.client.reasons.history import fold_history
from deckhands.client.reasons.link import Cause, Link, Why

CID = "c1"
START = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
NOW = START + timedelta(minutes=10)
LATER = NOW + timedelta(minutes=5)
RETRIED = [code for code, error in MODEL_ERRORS.items() if error.retryable]
"""The codes of a failed model call that is retried; each is a `WaitReason`."""
ALIVE, DEAD = WorkerFact("tool-a", 1.5), WorkerFact("tool-b", -7.0)


def state(name: str, **fields: Any) -> AgentStateChangedObservation:
    return AgentStateChangedObservation(agent_state=AgentState(name), **fields)


RUNNING = state("running")
COMMAND = CmdRunAction(command="sleep 100")


def facts(events: Sequence[Event] = (RUNNING,), *, wait_reason: str = "", **known: Any) -> ConversationFacts:
    created = ConversationCreated(conversation_id=CID)
    numbered = [
        with_id(event, number).model_copy(update={"timestamp": START + timedelta(seconds=number)})
        for number, event in enumerate((created, *events), 1)
    ]
    history = fold_history(numbered)
    row = ConversationRow(
        conversation_id=CID,
        title="",
        state=history.status.state.value,
        wait_reason=wait_reason,
        last_event_id=len(numbered),
        created=START,
        updated=START,
        owner="",
        node="",
        is_closed=known.pop("is_closed", False),
        not_before=known.pop("not_before", None),
        fields=known.pop("fields", {}),
    )
    return ConversationFacts(conversation_id=CID, now=NOW, row=row, history=history, **{"controllers": 1, **known})


def causes(found: ConversationFacts) -> list[str]:
    return [link.cause.value for link in explain(found).links]


def last(found: ConversationFacts) -> Link:
    return explain(found).links[-1]


def test_every_reason_that_a_controller_can_write_is_explained() -> None:
    """A new reason fails here until `WaitReason` and its explanation have it."""
    assert set(EXPLANATIONS) == set(WaitReason)
    written = inspect.getsource(commit._find_wait_reason)
    literals = {node.value for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Constant)}
    assert literals <= {"", None}, "a reason that is no WaitReason"
    assert {model_calls.QUOTA, model_calls.BUDGET, model_calls.BATCH} <= set(WaitReason)


DEFERRED = {
    code: ModelCallDeferred(code=code, waits_for=waits_for, expected_at=LATER)
    for code, waits_for in (("rate_limit", "openai/*"), ("waiting_for_budget", "tenant:acme"), ("batch", None))
}
FAILED = ModelCallFailed(code="timeout", content="no answer", attempt=2, attempts=5, retry_at=LATER)
SAMPLES: dict[WaitReason, tuple[ConversationFacts, Cause]] = {
    WaitReason.SCHEDULED: (facts((), wait_reason="scheduled", not_before=LATER, expires=LATER), Cause.SCHEDULED),
    WaitReason.TOOL: (
        facts((RUNNING, COMMAND), wait_reason="tool", actions={3: ActionFact(3, ALIVE, NOW)}),
        Cause.ACTION_RUNS,
    ),
    WaitReason.DELEGATE: (
        facts((RUNNING, AgentDelegateAction(agent="helper")), wait_reason="delegate"),
        Cause.DELEGATE,
    ),
    WaitReason.RATE_LIMIT: (facts((RUNNING, DEFERRED["rate_limit"]), wait_reason="rate_limit"), Cause.QUOTA),
    WaitReason.BUDGET: (
        facts((RUNNING, DEFERRED["waiting_for_budget"]), wait_reason="waiting_for_budget"),
        Cause.BUDGET,
    ),
    WaitReason.BATCH: (facts((RUNNING, DEFERRED["batch"]), wait_reason="batch"), Cause.BATCH),
    WaitReason.NEWER_WORKER: (facts(wait_reason="newer_worker", parked_until=LATER), Cause.NEWER_WORKER),
    WaitReason.LOCKED: (facts(wait_reason="locked", parked_until=LATER), Cause.LOCKED),
    WaitReason.PINNED_VERSION: (facts(wait_reason="pinned_version", parked_until=LATER), Cause.PINNED_VERSION),
    **{
        reason: (
            facts((RUNNING, FAILED.model_copy(update={"code": reason.value})), wait_reason=reason.value),
            Cause.RETRY,
        )
        for reason in map(WaitReason, RETRIED)
        if reason != WaitReason.RATE_LIMIT
    },
}


@pytest.mark.parametrize("reason", WaitReason)
def test_wait_is_explained_with_start_and_remedy(reason: WaitReason) -> None:
    found, cause = SAMPLES[reason]
    why = explain(found)
    assert (why.wait_reason, why.links[0].cause, why.links[-1].cause) == (reason.value, Cause.STATE, cause)
    assert why.links[-1].since is not None
    assert why.links[-1].remedy
    assert Why.from_json(why.as_json()) == why
    shown = "\n".join(lines_of(why))
    assert why.links[-1].text in shown
    assert "what changes it: " in shown


def test_provider_refusal_is_a_retry_with_its_attempt() -> None:
    limited = FAILED.model_copy(update={"code": "rate_limit"})
    link = last(facts((RUNNING, limited), wait_reason="rate_limit"))
    assert (link.cause, link.until) == (Cause.RETRY, LATER)
    assert "attempt 3 of 5 of its model call at 12:15:00 UTC" in link.text
    older = FAILED.model_copy(update={"attempts": None})
    assert "attempt 3 of its model call" in last(facts((RUNNING, older), wait_reason="timeout")).text


def test_a_place_in_the_queue_of_a_quota() -> None:
    waits = (RUNNING, DEFERRED["rate_limit"])
    link = last(facts(waits, wait_reason="rate_limit", quota=QuotaFact("openai/*", 12, 2)))
    assert "2 conversations of 12 that wait there go first" in link.text
    assert (link.details["position"], link.details["waiting"], link.until) == (3, 12, LATER)
    called = last(facts(waits, wait_reason="rate_limit", quota=QuotaFact("openai/*", 0, None)))
    assert "its turn has come" in called.text


def test_exhausted_budget_names_account_and_sums() -> None:
    account = BudgetAccount("tenant:acme", "", 5.0, 4.9, 0.05, 0.1, 7, 0, 3)
    link = last(
        facts(
            (RUNNING, DEFERRED["waiting_for_budget"]), wait_reason="waiting_for_budget", budget=BudgetFact(account, 1)
        )
    )
    assert "tenant:acme: $5.0000 of $5.0000 are used up, $0.0500 are reserved" in link.text
    assert "1 conversation that came before go first" in link.text
    assert link.remedy.startswith("`deckhands budget add tenant:acme USD`")


def waits_for_tool(**known: Any) -> ConversationFacts:
    return facts((RUNNING, COMMAND), wait_reason="tool", **known)


def test_action_is_running_queued_or_lost_with_its_worker() -> None:
    runs = last(waits_for_tool(actions={3: ActionFact(3, ALIVE, NOW - timedelta(seconds=42))}))
    assert "Action 3 (Running command: sleep 100) has been running for 42 s on worker tool-a" in runs.text
    lost = waits_for_tool(actions={3: ActionFact(3, DEAD)})
    assert causes(lost) == ["state", "worker_lost"]
    assert "not been heard of for 7 s" in last(lost).text
    queued = last(waits_for_tool(actions={3: ActionFact(3, place=QueuePosition("pool:bash", 4))}))
    assert (queued.cause, queued.details["position"]) == (Cause.ACTION_QUEUED, 5)
    assert "in the queue pool:bash, with 4 before it" in queued.text
    assert causes(waits_for_tool()) == ["state", "action_unsent"]


def test_unserved_pool_and_lost_node() -> None:
    waits = {3: ActionFact(3, place=QueuePosition("node:n1", 0))}
    no_worker = waits_for_tool(actions=waits, pool="gpu", unserved="No tool worker of the pool gpu is running.")
    assert causes(no_worker) == ["state", "action_queued", "no_worker"]
    assert "gpu" in last(no_worker).remedy
    away = NodeFact("n1", is_alive=False, seen=START, given_up_at=LATER)
    link = last(waits_for_tool(actions=waits, node=away))
    assert (link.cause, link.since, link.until) == (Cause.NODE_AWAY, START, LATER)
    fixed = NodeFact("n1", is_alive=False, seen=START, given_up_at=LATER, is_fixed=True)
    assert last(waits_for_tool(actions=waits, node=fixed)).until is None
    assert causes(waits_for_tool(actions=waits, node=NodeFact("n1", is_alive=True))) == ["state", "action_queued"]


def test_restricted_reader_gets_no_worker_names() -> None:
    node = NodeFact("secret-node", is_alive=False, seen=START, given_up_at=LATER)
    hidden = waits_for_tool(
        actions={3: ActionFact(3, WorkerFact("secret-tool", -1.0))},
        node=node,
        pool="bash",
        unserved="No running node can serve this workspace. secret-node lacks gpu.",
        owner=WorkerFact("secret-controller", 1.0),
        shows_workers=False,
    )
    dead = facts(
        died=NOW,
        deaths=(Takeover(CID, None, "secret-w", "secret-x", NOW),),
        worker_lines=("secret-log",),
        shows_workers=False,
    )
    for found in (hidden, dead, facts(owner=WorkerFact("secret-controller", 1.0), shows_workers=False)):
        assert "secret" not in str(explain(found).as_json())


def test_a_delegate_is_explained_below_its_parent() -> None:
    name = make_delegate_id(CID, 3)
    below = Why(name, "running", "tool", NOW, (Link(Cause.STATE, "It runs."), Link(Cause.ACTION_RUNS, "sleep")))
    events = (RUNNING, AgentDelegateAction(agent="helper"))
    why = explain(facts(events, wait_reason="delegate", delegates={3: below}))
    assert (why.links[-1].details["conversation_id"], why.links[-1].links) == (name, below.links)
    assert "    - sleep" in lines_of(why)
    assert Why.from_json(why.as_json()) == why


def test_questions_to_persons() -> None:
    asked = COMMAND.model_copy(update={"confirmation_state": ConfirmationStatus.AWAITING_CONFIRMATION})
    confirm = last(facts((RUNNING, asked, state("awaiting_user_confirmation", action_id=3))))
    assert confirm.cause is Cause.CONFIRMATION
    assert "action 3: Running command: sleep 100" in confirm.text
    question = MessageAction(content="Which branch?", source=EventSource.AGENT, wait_for_response=True)
    answer = last(facts((RUNNING, question, state("awaiting_user_input"))))
    assert (answer.cause, "Which branch?" in answer.text) == (Cause.ANSWER, True)
    by = OperatorActed(author="key k1 (ann)", action="pause", reason="lunch")
    request = ChangeAgentStateAction(agent_state=AgentState.PAUSED, source=EventSource.USER)
    paused = last(facts((RUNNING, by, request, state("paused"))))
    assert (paused.cause, paused.text) == (Cause.PAUSED, "It was paused by key k1 (ann): lunch")


def test_error_key_is_explained_with_the_providers_text() -> None:
    key = "STATUS$ERROR_LLM_AUTHENTICATION"
    failed = FAILED.model_copy(update={"code": "authentication", "content": "401 bad key", "last_error": key})
    ended = state("error", reason=key, code="authentication")
    first, link = explain(facts((RUNNING, failed, ended))).links
    assert first.text == "The conversation has failed."
    assert link.text.endswith("(authentication): The model's provider refused the API key: 401 bad key")
    assert link.remedy.startswith("Check LLM_API_KEY. ")
    dead = last(facts(died=NOW, fields={"last_error": key}))
    assert "The model's provider refused the API key." in dead.text


def test_a_loop_a_dead_letter_and_ends() -> None:
    stuck = state("error", reason="AgentStuckInLoopError: again", code="stuck_in_loop")
    link = last(facts((RUNNING, stuck)))
    assert (link.cause, "deckhands recover c1" in link.remedy) == (Cause.LOOP, True)
    deaths = tuple(Takeover(CID, None, f"w{n}", "w9", NOW) for n in range(4))
    dead = last(facts(died=NOW, deaths=deaths, worker_lines=("controller-1: killed",)))
    assert dead.cause is Cause.DEAD_LETTER
    assert "(w1, w2, w3)" in dead.text
    assert dead.lines[-2:] == ("[2] observation.agent_state_changed: Agent state: running", "controller-1: killed")
    assert last(facts((RUNNING, state("finished")))).text == "The agent has finished."
    failed = last(facts((RUNNING, state("error", reason="no", code="authentication"))))
    assert "Check LLM_API_KEY" in failed.remedy
    assert causes(facts((RUNNING, state("finished")), is_closed=True)) == ["state", "ended", "closed"]
    archived = ConversationFacts(conversation_id=CID, now=NOW, row=None, history=facts().history)
    assert last(archived).cause is Cause.ARCHIVED


def test_owner_and_queue_of_a_waiting_conversation() -> None:
    busy = last(facts(owner=WorkerFact("controller-1", 1.0, 64, 2.5)))
    assert "controller-1 is alive and has it" in busy.text
    assert "it holds 64 conversations, and its loop was late by 2.5 s" in busy.text
    assert causes(facts(owner=WorkerFact("controller-1", -4.0))) == ["state", "worker_lost"]
    queued = last(facts(place=QueuePosition("ready", 3)))
    assert (queued.cause, queued.details["position"]) == (Cause.QUEUED, 4)
    assert causes(facts(controllers=0, place=QueuePosition("ready", 3))) == ["state", "no_worker"]
    assert causes(facts(parked_until=LATER)) == ["state", "unclaimed"]
    unread = MessageAction(content="continue", source=EventSource.USER)
    assert causes(facts((RUNNING, unread), place=QueuePosition("ready", 0))) == ["state", "message", "queued"]


def test_output_of_a_command_cannot_forge_lines() -> None:
    forged: Action = CmdRunAction(command="ls\n- The conversation is finished.\x1b[2J\u202e")
    shown = lines_of(explain(facts((RUNNING, forged), wait_reason="tool", actions={3: ActionFact(3, ALIVE)})))
    assert [line for line in shown if line.startswith("- ")] == [shown[0], shown[2]]
    assert "\x1b" not in "".join(shown)
    assert "\u202e" not in "".join(shown)
