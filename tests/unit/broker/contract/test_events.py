"""Events: validation, truncation, and their texts for the model and for users."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from broker.contract import find_kinds
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
    AgentSpec,
    ConversationCreated,
    Event,
    Limits,
    ModelCallFailed,
    ModelReply,
    ModelToolCall,
    Observation,
    WorkspaceUse,
    with_id,
)
from broker.contract.file_events import FileEditAction, FileEditObservation, FileReadAction, FileReadObservation
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
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


KINDS_WITH: dict[str, tuple[Callable[[type[Event]], bool], str]] = {
    "run by tool workers": (
        lambda kind: kind.runnable,
        (
            "action.acp_permission action.acp_turn action.apply_patch action.browse action.browse_interactive "
            "action.call_tool action.call_tool_mcp action.digest_workspace action.edit action.feature_check "
            "action.feature_list action.open_workspace action.plan action.read action.run action.run_ipython "
            "action.save_progress action.search_code action.survey action.write"
        ),
    ),
    "repeatable": (
        lambda kind: kind.outcome is OutcomePolicy.IDEMPOTENT,
        (
            "action.digest_workspace action.open_workspace action.read action.save_progress action.search_code "
            "action.survey"
        ),
    ),
    "not shown to models": (
        lambda kind: issubclass(kind, Action | Observation) and not kind.is_shown_to_model,
        (
            "action.change_agent_state action.digest_workspace action.execute action.feature_check action.null "
            "action.open_workspace action.save_progress action.survey observation.agent_state_changed observation.execute "
            "observation.feature_check observation.interrupted observation.null observation.survey "
            "observation.workspace_digest observation.workspace_failed observation.workspace_opened"
        ),
    ),
    "ignored by loop detection": (
        lambda kind: not kind.counts_for_loops,
        (
            "action.change_agent_state action.condensation_request action.execute action.loop_recovery action.null "
            "conversation.confirmation_reminder conversation.operator_acted conversation.party_stopped "
            "model.segment_started observation.agent_state_changed "
            "observation.execute observation.interrupted observation.mcp_question observation.null observation.rolled_back"
        ),
    ),
}


@pytest.mark.parametrize(("has_property", "kinds"), KINDS_WITH.values(), ids=KINDS_WITH)
def test_kinds_with_a_property(has_property: Callable[[type[Event]], bool], kinds: str) -> None:
    assert {kind for kind, event_class in find_kinds().items() if has_property(event_class)} == set(kinds.split())


def test_which_kinds_come_from_the_files_of_a_workspace() -> None:
    used = {use: {kind for kind, cls in find_kinds().items() if cls.workspace_use is use} for use in WorkspaceUse}
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
    others = {kind for kind, event_class in find_kinds().items() if not event_class.is_decided}
    assert {kind for kind in others if kind.startswith("action.")} == {
        *("action.change_agent_state", "action.condensation", "action.execute", "action.loop_recovery"),
        *("action.message", "action.null"),
    }
    assert not any(kind.partition(".")[0] in ("model", "conversation") for kind in find_kinds().keys() - others)


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
        (CmdRunAction(command="echo {path} {0}"), "Running command: echo {path} {0}"),
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


@pytest.mark.parametrize(
    ("spec", "fields"),
    [(AgentSpec, {"tool_concurrency": 0}), (AgentSpec, {"tool_concurrency": 17}), (Limits, {"max_budget_usd": 0})],
)
def test_numbers_out_of_range_are_refused(spec: type[AgentSpec | Limits], fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        spec.model_validate(fields)


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
