"""Condensers that call a model: their prompts, and the parsing of the answers."""

from collections.abc import Sequence

import pytest

from broker.contract.actions import AgentThinkAction, CmdRunAction, CondensationAction
from broker.contract.condenser_specs import (
    AskingCondenserSpec,
    LLMAttentionCondenserSpec,
    LLMSummarizingCondenserSpec,
    StructuredSummaryCondenserSpec,
)
from broker.contract.events import Event, LLMSpec, ModelReply, with_id
from broker.contract.observations import TRUNCATION_MARKER, AgentCondensationObservation, CmdOutputObservation
from controller_worker.memory.condensers.condenser import Inquiry, render_event
from controller_worker.memory.condensers.llm_attention import RANK_EVENTS
from controller_worker.memory.condensers.llm_summarizing import INSTRUCTIONS
from controller_worker.memory.condensers.registry import create_condenser
from controller_worker.memory.condensers.structured_summary import CREATE_STATE_SUMMARY
from controller_worker.memory.view import View
from controller_worker.providers.messages.messages import TextPart
from tests.controller_parts import call, said

ASKING = [LLMSummarizingCondenserSpec, LLMAttentionCondenserSpec, StructuredSummaryCondenserSpec]


def actions(count: int, *, first: int = 1) -> list[Event]:
    return [with_id(CmdRunAction(command=f"c{number}"), number) for number in range(first, first + count)]


def asked(
    spec: AskingCondenserSpec, events: Sequence[Event], *, is_asked: bool = False, overflows: int = 0
) -> tuple[Inquiry, str]:
    """The inquiry and its whole text."""
    inquiry = create_condenser(spec).condense(View(events, is_asked, overflows))
    assert isinstance(inquiry, Inquiry)
    (message,) = inquiry.messages
    (part,) = message.content
    assert isinstance(part, TextPart)
    return inquiry, part.text


@pytest.mark.parametrize("made", ASKING)
def test_no_model_call_for_a_short_or_empty_history(made: type[AskingCondenserSpec]) -> None:
    view = View(actions(10))
    assert create_condenser(made(max_size=10)).condense(view) is view
    for count in (0, 1, 2):  # B14 again
        condensed = create_condenser(made(keep_first=1, max_size=10)).condense(View(actions(count), has_request=True))
        assert condensed == CondensationAction(forgotten_event_ids=())


@pytest.mark.parametrize("made", ASKING)
def test_another_model_may_be_asked(made: type[AskingCondenserSpec]) -> None:
    llm = LLMSpec(model="acme/small")
    assert asked(made(max_size=4, llm=llm), actions(9))[0].llm == llm
    assert asked(made(max_size=4), actions(9))[0].llm is None


@pytest.mark.parametrize("made", ASKING)
def test_long_events_lose_more_of_their_middle_after_overflows(made: type[AskingCondenserSpec]) -> None:
    events = [with_id(said("x" * 5_000), number) for number in range(1, 10)]
    spec = made(max_size=4, max_event_length=100)
    shown = len("MessageAction (user)\n")
    assert "x" * (50 - shown) + TRUNCATION_MARKER + "x" * 50 + "\n</EVENT>" in asked(spec, events)[1]
    # 0.8 ** 2 of it.
    again = asked(spec, events, overflows=2)[1]
    assert "x" * (32 - shown) + TRUNCATION_MARKER + "x" * 32 + "\n</EVENT>" in again


def test_summary_prompt_and_forgotten_events() -> None:
    inquiry, text = asked(LLMSummarizingCondenserSpec(keep_first=2, max_size=10), actions(11))
    assert inquiry.tools == ()
    assert text == (
        f"{INSTRUCTIONS}\n\n<PREVIOUS SUMMARY>\nNo events summarized\n</PREVIOUS SUMMARY>\n\n"
        + "\n".join(f"<EVENT id={n}>\nCmdRunAction (agent)\ncommand: c{n}\n</EVENT>" for n in range(3, 10))
        + "\n\nWrite the notes now."
    )
    # 2 at the beginning, the summary and 2 of the latest: half of 10.
    assert inquiry.conclude(ModelReply(content=" It is done. ")) == CondensationAction(
        forgotten_events_start_id=3, forgotten_events_end_id=9, summary="It is done.", summary_offset=2
    )


def test_an_earlier_summary_goes_into_the_next() -> None:
    spec = LLMSummarizingCondenserSpec(keep_first=1, max_size=6)
    events = [*actions(1), AgentCondensationObservation(content="Earlier."), *actions(5, first=20)]
    inquiry, text = asked(spec, events)
    assert "<PREVIOUS SUMMARY>\nEarlier.\n</PREVIOUS SUMMARY>" in text
    assert "<EVENT id=0>" not in text
    assert inquiry.conclude(ModelReply(content="Later.")) == CondensationAction(
        forgotten_events_start_id=20, forgotten_events_end_id=23, summary="Later.", summary_offset=1
    )
    assert inquiry.conclude(ModelReply(tool_calls=(call("x"),))).summary == "Earlier."  # a reply without words


def test_a_result_is_summarised_with_its_command() -> None:
    pair = [CmdRunAction(id=4, command="ls"), CmdOutputObservation(id=5, command="ls", content="a.txt", cause=4)]
    spec = LLMSummarizingCondenserSpec(keep_first=1, max_size=5)
    inquiry, text = asked(spec, [*actions(3), *pair, with_id(said("x"), 6)], is_asked=True)
    assert "<EVENT id=5>\nCmdOutputObservation (environment)\na.txt\n</EVENT>" in text
    assert inquiry.conclude(ModelReply(content="s")).forgotten == (2, 3, 4, 5)


def test_the_model_ranks_and_the_newest_fill_up() -> None:
    spec = LLMAttentionCondenserSpec(keep_first=1, max_size=10)
    inquiry, text = asked(spec, actions(11))
    assert inquiry.tools == (RANK_EVENTS,)
    assert text.count("<EVENT id=") == 11
    ranked = call("rank_events", '{"ids": [4, 4, 999, 1, 3]}')
    # 1 at the beginning, 4 and 3 as ranked, 11 and 10 as the newest: half of 10.
    assert inquiry.conclude(ModelReply(tool_calls=(ranked,))).forgotten == (2, 5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("reply", "forgotten"),
    [
        (ModelReply(content='Here: {"ids": [3, 2]}'), (4, 5, 6, 7)),
        # Without a ranking the newest stay.
        (ModelReply(content="no idea"), (2, 3, 4, 5)),
        (ModelReply(content="{"), (2, 3, 4, 5)),
        (ModelReply(tool_calls=(call("rank_events", "["),)), (2, 3, 4, 5)),
        (ModelReply(tool_calls=(call("rank_events", '{"ids": 3}'),)), (2, 3, 4, 5)),
        (ModelReply(tool_calls=(call("rank_events", '{"ids": ["3", null]}'),)), (2, 3, 4, 5)),
    ],
)
def test_rankings_in_other_forms(reply: ModelReply, forgotten: tuple[int, ...]) -> None:
    inquiry, _ = asked(LLMAttentionCondenserSpec(keep_first=1, max_size=6), actions(7))
    assert inquiry.conclude(reply).forgotten == forgotten


def test_the_form() -> None:
    assert CREATE_STATE_SUMMARY.parameters["required"] == ["user_context", "completed_tasks", "pending_tasks"]
    assert list(CREATE_STATE_SUMMARY.parameters["properties"]) == [
        *("user_context", "completed_tasks", "pending_tasks", "current_state"),
        *("files_modified", "function_changes", "data_structures"),
        *("tests_written", "tests_passing", "failing_tests", "error_messages"),
        *("branch_created", "branch_name", "commits_made", "pr_created", "pr_status"),
        *("dependencies", "other_relevant_context"),
    ]


def test_a_filled_form_becomes_the_summary() -> None:
    inquiry, _ = asked(StructuredSummaryCondenserSpec(keep_first=1, max_size=6), actions(7))
    assert inquiry.tools == (CREATE_STATE_SUMMARY,)
    form = call("create_state_summary", '{"user_context": "Fix it.", "branch_name": "fix", "pr_status": ""}')
    assert inquiry.conclude(ModelReply(tool_calls=(form,))) == CondensationAction(
        forgotten_events_start_id=2,
        forgotten_events_end_id=6,
        summary="# State Summary\n\n## Core Information\n**User Context**: Fix it.\n\n"
        "## Version Control\n**Branch Name**: fix",
        summary_offset=1,
    )


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        (
            ModelReply(content="All done."),
            "# State Summary\n\n## Additional Context\n**Other Relevant Context**: All done.",
        ),
        (ModelReply(tool_calls=(call("create_state_summary", "{"),)), "# State Summary"),
    ],
)
def test_a_form_that_cannot_be_read(reply: ModelReply, summary: str) -> None:
    inquiry, _ = asked(StructuredSummaryCondenserSpec(keep_first=1, max_size=6), actions(7))
    assert inquiry.conclude(reply).summary == summary


def test_events_as_text() -> None:
    assert render_event(said("hello")) == "MessageAction (user)\nhello"
    assert render_event(AgentThinkAction(thought="hm")) == "AgentThinkAction (agent)\nthought: hm"
    assert (
        render_event(CmdRunAction(command="ls", is_input=True)) == "CmdRunAction (agent)\ncommand: ls\nis_input: True"
    )
