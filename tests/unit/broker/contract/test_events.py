"""Events: validation, truncation, and their texts for the model and for users."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from broker.contract.actions import (
    AgentFinishAction,
    AgentRejectAction,
    ChangeAgentStateAction,
    CmdRunAction,
    CondensationAction,
    MessageAction,
    SystemMessageAction,
)
from broker.contract.agent_state import AgentState, is_settled
from broker.contract.events import (
    Action,
    ActionSecurityRisk,
    AgentSpec,
    BlobRef,
    ConversationCreated,
    Event,
    EventSource,
    Limits,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    Observation,
    WorkspaceSpec,
    WorkspaceUse,
    with_id,
)
from broker.contract.file_events import FileEditAction, FileEditObservation, FileReadAction, FileReadObservation
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    truncate_content,
)
from broker.contract.tool_specs import OutcomePolicy

MARKER = "\n[... Observation truncated due to length ...]\n"


def test_an_event_cannot_be_changed() -> None:
    event = MessageAction(content="x")
    with pytest.raises(ValidationError, match="frozen"):
        event.content = "y"  # type: ignore[misc]
    assert with_id(event, 7).id == 7
    assert event.id == 0


def test_the_wire_form_leaves_out_what_is_not_there() -> None:
    assert CmdRunAction(command="ls", id=9).wire() == {
        "kind": "action.run",
        "source": "agent",
        "thought": "",
        "security_risk": -1,
        "confirmation_state": "confirmed",
        "command": "ls",
        "is_input": False,
        "blocking": False,
        "is_static": False,
        "hidden": False,
    }


def test_an_export_begins_with_what_every_event_has() -> None:
    event = ErrorObservation(content="x", cause=3, id=4, timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert event.export() == {
        "id": 4,
        "kind": "observation.error",
        "source": "environment",
        "cause_id": 3,
        "timestamp": "2026-01-02T03:04:05Z",
        "content": "x",
        "error_id": "",
    }


def test_kinds_are_not_derived_from_classes() -> None:
    assert Event.KINDS["action.run"] is CmdRunAction
    assert Event.KINDS["observation.run"] is CmdOutputObservation
    assert Event.KINDS["conversation.created"] is ConversationCreated
    with pytest.raises(ValidationError):
        CmdRunAction(kind="action.read", command="ls")  # type: ignore[arg-type]


def test_which_kinds_a_tool_worker_runs() -> None:
    runnable = {kind for kind, event_class in Event.KINDS.items() if event_class.runnable}
    assert runnable == {
        "action.acp_permission",
        "action.acp_turn",
        "action.apply_patch",
        "action.browse",
        "action.browse_interactive",
        "action.call_tool",
        "action.call_tool_mcp",
        "action.digest_workspace",
        "action.edit",
        "action.feature_check",
        "action.feature_list",
        "action.open_workspace",
        "action.plan",
        "action.read",
        "action.run",
        "action.run_ipython",
        "action.save_progress",
        "action.search_code",
        "action.survey",
        "action.write",
    }


def test_repeatable_actions() -> None:
    again = {kind for kind, event_class in Event.KINDS.items() if event_class.outcome is OutcomePolicy.IDEMPOTENT}
    assert again == {
        "action.digest_workspace",
        "action.open_workspace",
        "action.read",
        "action.save_progress",
        "action.search_code",
        "action.survey",
    }
    assert Event.outcome is OutcomePolicy.AT_MOST_ONCE


def test_which_kinds_the_model_is_not_shown() -> None:
    hidden = {
        kind
        for kind, event_class in Event.KINDS.items()
        if issubclass(event_class, Action | Observation) and not event_class.is_shown_to_model
    }
    assert hidden == {
        "action.change_agent_state",
        "action.digest_workspace",
        "action.execute",
        "action.feature_check",
        "action.null",
        "action.open_workspace",
        "action.save_progress",
        "action.survey",
        "observation.agent_state_changed",
        "observation.execute",
        "observation.feature_check",
        "observation.interrupted",
        "observation.null",
        "observation.survey",
        "observation.workspace_digest",
        "observation.workspace_failed",
        "observation.workspace_opened",
    }


def test_which_kinds_loop_detection_passes_over() -> None:
    assert {kind for kind, event_class in Event.KINDS.items() if not event_class.counts_for_loops} == {
        *("action.change_agent_state", "action.condensation_request", "action.execute", "action.loop_recovery"),
        *("action.null", "conversation.operator_acted", "observation.agent_state_changed", "observation.execute"),
        *("observation.interrupted", "observation.mcp_question", "observation.null", "observation.rolled_back"),
    }


def test_which_kinds_come_from_the_files_of_a_workspace() -> None:
    used = {use: {kind for kind, cls in Event.KINDS.items() if cls.workspace_use is use} for use in WorkspaceUse}
    assert used[WorkspaceUse.READ] == {"observation.read"}
    assert used[WorkspaceUse.CHANGED] == {
        "observation.acp",
        "observation.browse",
        "observation.download",
        "observation.edit",
        "observation.execute",
        "observation.feature_check",
        "observation.run",
        "observation.run_ipython",
        "observation.save_progress",
        "observation.write",
    }


def test_which_kinds_others_than_the_controller_write() -> None:
    others = {kind for kind, event_class in Event.KINDS.items() if not event_class.is_decided}
    assert {kind for kind in others if kind.startswith("action.")} == {
        *("action.change_agent_state", "action.condensation", "action.execute", "action.loop_recovery"),
        *("action.message", "action.null"),
    }
    assert not any(kind.partition(".")[0] in ("model", "conversation") for kind in Event.KINDS.keys() - others)


def test_a_sentence_shows_braces_of_the_event_as_they_are() -> None:
    assert CmdRunAction(command="echo {path} {0}").sentence == "Running command: echo {path} {0}"


def test_risks_are_the_integers_of_openhands() -> None:
    assert {risk.name: int(risk) for risk in ActionSecurityRisk} == {"UNKNOWN": -1, "LOW": 0, "MEDIUM": 1, "HIGH": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"forgotten_event_ids": [1], "forgotten_events_start_id": 1, "forgotten_events_end_id": 2},
        {"forgotten_events_start_id": 1},
        {"forgotten_events_end_id": 1},
        {"forgotten_event_ids": [1], "forgotten_events_start_id": 1},
        {"forgotten_event_ids": [1], "summary": "s"},
        {"forgotten_event_ids": [1], "summary_offset": 0},
    ],
)
def test_a_condensation_has_one_form_of_forgetting(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"Give either forgotten_event_ids|Give summary and summary_offset"):
        CondensationAction(**fields)  # type: ignore[arg-type]


def test_events_forgotten_by_a_condensation() -> None:
    assert CondensationAction(forgotten_event_ids=(4, 2, 9)).forgotten == (4, 2, 9)
    assert CondensationAction(forgotten_event_ids=()).forgotten == ()
    assert CondensationAction(forgotten_events_start_id=3, forgotten_events_end_id=6).forgotten == (3, 4, 5, 6)
    whole = CondensationAction(forgotten_event_ids=(1,), summary="", summary_offset=0)
    assert (whole.summary, whole.summary_offset) == ("", 0)


def test_truncation_keeps_both_ends() -> None:
    assert truncate_content("0123456789", 4) == f"01{MARKER}89"
    assert truncate_content("0123456789", 5) == f"01{MARKER}89"
    assert truncate_content("0123456789", 10) == "0123456789"
    assert truncate_content("0123456789", None) == "0123456789"
    assert truncate_content("0123456789", -1) == "0123456789"
    assert truncate_content("0123456789", 0) == MARKER


def test_a_commands_output_is_cut_at_30000_characters() -> None:
    exact = CmdOutputObservation(content="x" * 30_000, command="c")
    assert exact.content == "x" * 30_000
    longer = CmdOutputObservation(content="a" * 15_000 + "b" + "c" * 15_000, command="c")
    assert longer.content == "a" * 15_000 + MARKER + "c" * 15_000
    hidden = CmdOutputObservation(content="x" * 40_000, command="c", hidden=True)
    assert hidden.content == "x" * 40_000


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (CmdOutputMetadata(), "out"),
        (CmdOutputMetadata(exit_code=0), "out\n[Command finished with exit code 0]"),
        (CmdOutputMetadata(prefix="[before]\n", suffix="\n[after]"), "[before]\nout\n[after]"),
        (
            CmdOutputMetadata(exit_code=2, working_dir="/srv", py_interpreter_path="/usr/bin/python3", suffix="\n[s]"),
            (
                "out\n[s]\n[Current working directory: /srv]\n[Python interpreter: /usr/bin/python3]"
                "\n[Command finished with exit code 2]"
            ),
        ),
    ],
)
def test_what_a_model_sees_of_a_commands_output(metadata: CmdOutputMetadata, text: str) -> None:
    observation = CmdOutputObservation(content="out", command="c", metadata=metadata)
    assert observation.agent_text == text
    assert observation.exit_code == metadata.exit_code


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (MessageAction(content="Hello"), "Hello"),
        (CmdRunAction(command="ls"), "Running command: ls"),
        (FileReadAction(path="a.txt"), "Reading a.txt"),
        (FileEditAction(path="a.txt", command="create"), "Editing a.txt (create)"),
        (FileEditAction(path="a.txt"), "Editing a.txt (draft)"),
        (AgentFinishAction(final_thought="Done"), "Done"),
        (AgentFinishAction(thought="Thought"), "Thought"),
        (AgentFinishAction(), "All done."),
        (AgentRejectAction(), "Task is rejected by the agent."),
        (AgentRejectAction(outputs={"reason": "No"}), "Task is rejected by the agent. No"),
        (ChangeAgentStateAction(agent_state=AgentState.PAUSED), "Asked to be paused"),
        (
            SystemMessageAction(content="abc", tools=("t",), agent_class="A"),
            "System prompt of A (3 characters, 1 tool)",
        ),
        (CmdOutputObservation(command="ls"), "Command `ls` executed with exit code -1."),
        (FileReadObservation(path="a"), "I read the file a."),
        (FileEditObservation(path="a"), "I edited the file a."),
        (AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="r"), "Agent state: error (r)"),
        (AgentStateChangedObservation(agent_state=AgentState.RUNNING), "Agent state: running"),
        (ConversationCreated(conversation_id="c-1"), "Conversation c-1 (CodeActAgent)"),
        (ModelReply(model="m"), "m replied"),
        (ModelReply(model="m", tool_calls=(ModelToolCall(id="1", name="t", arguments="{}"),)), "m replied and calls t"),
        (ModelCallFailed(code="timeout", content="late"), "The model call failed (timeout): late"),
    ],
)
def test_every_event_can_be_told_in_a_sentence(event: Event, sentence: str) -> None:
    assert event.sentence == sentence


def test_defaults_of_a_conversation() -> None:
    created = ConversationCreated(conversation_id="c-1")
    assert (created.agent, created.workspace, created.limits) == (AgentSpec(), WorkspaceSpec(), Limits())
    assert (created.agent.tool_concurrency, created.limits.max_iterations) == (1, 500)
    assert created.source is EventSource.ENVIRONMENT
    for bad in ({"tool_concurrency": 0}, {"tool_concurrency": 17}):
        with pytest.raises(ValidationError):
            AgentSpec(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Limits(max_budget_usd=0)


def test_blobs_are_named_by_field() -> None:
    event = FileReadObservation(path="a", blobs={"content": BlobRef(sha256="0", size_bytes=5)})
    assert event.wire()["blobs"] == {"content": {"sha256": "0", "size_bytes": 5}}


def test_settled_states() -> None:
    assert {state.value for state in AgentState if is_settled(state)} == {
        *("awaiting_user_confirmation", "awaiting_user_input", "error", "finished", "paused", "rejected", "stopped")
    }


@pytest.mark.parametrize("name", Limits.model_fields)
@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_is_no_limit(name: str, flag: bool) -> None:
    with pytest.raises(ValidationError, match="is not a number"):
        Limits.model_validate({name: flag})


def test_a_table_has_its_numbers_as_texts() -> None:
    assert Limits.model_validate({"max_iterations": "40", "max_budget_usd": "0.5"}) == Limits(
        max_iterations=40, max_budget_usd=0.5
    )
