"""What the model sees: from the log to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, CmdRunAction, MessageAction, NullAction
from broker.contract.events import Event, EventSource, ModelCallFailed, ModelReply, ToolCallMetadata, with_id
from broker.contract.file_events import (
    FileEditAction,
    FileEditObservation,
    FileReadAction,
    FileReadObservation,
    FileWriteObservation,
)
from broker.contract.observations import (
    TRUNCATION_MARKER,
    AgentDelegateObservation,
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    LoopDetectionObservation,
    NullObservation,
    Observation,
    OutcomeUnknownObservation,
    SuccessObservation,
    UserRejectObservation,
)
from broker.contract.recall import MicroagentKnowledge, RecallObservation, RecallType
from controller_worker.memory.conversation_memory import (
    CONTINUE,
    FINISH_RESULT,
    NO_RESULT,
    ConversationMemory,
)
from controller_worker.model.prompt_history import NEVER_PROMPTED_FIELDS
from controller_worker.providers.messages.messages import NOT_SEEN, ImagePart, Message, TextPart, ToolCall
from tests.controller_parts import Core, answer, bash, call, finish, messages_of, said, started, think


def remember(events: Sequence[Event], **options: Any) -> list[Message]:
    return messages_of((with_id(event, number) for number, event in enumerate(events, 1)), **options)


def spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Role and text of each message; calls and images by their names."""
    return [
        (
            message.role,
            "".join(part.text if isinstance(part, TextPart) else f"<{part.url}>" for part in message.content)
            + "".join(f"[{made.id}]" for made in message.tool_calls)
            + (f"({message.tool_call_id})" if message.tool_call_id else ""),
        )
        for message in messages
    ]


def shown(core: Core) -> list[tuple[str, str]]:
    """The messages after the system message and the greeting of a conversation."""
    return spoken(remember(core.events))[3:]


# Plain events


def test_prompt_starts_with_the_system_message() -> None:
    core = Core("Fix it.")
    core.run()
    assert spoken(remember(core.events)) == [
        ("system", core.agent.system_prompt(core.state.setup.workspace)),
        ("user", "Fix it."),
        ("user", "\n\nThe workspace is /srv/project.\nToday is 2026-03-01 (UTC)."),
    ]


def test_persons_second_message_in_a_row_has_a_blank_line() -> None:
    assert spoken(remember([said("one"), said("two"), said("three")])) == [
        ("user", "one"),
        ("user", "\n\ntwo"),
        ("user", "\n\nthree"),
    ]


def test_images_follow_the_text_each_behind_its_number() -> None:
    urls = ("https://a/1.png", "file:///etc/passwd", "data:image/png;base64,iVBORw0KGgoA")
    message = MessageAction(content="see", source=EventSource.USER, image_urls=urls)
    assert remember([message])[0].content == (
        TextPart("see"),
        TextPart("Image 1:"),
        ImagePart("https://a/1.png"),
        TextPart("Image 2:"),
        ImagePart("data:image/png;base64,iVBORw0KGgoA"),
    )
    assert remember([message], sees_images=False)[0].content == (TextPart("see"), NOT_SEEN, NOT_SEEN)


def test_what_a_person_asked_for() -> None:
    assert spoken(remember([FileReadAction(path="/a", source=EventSource.USER)])) == [
        ("user", "User requested to read file: /a")
    ]
    edit = FileEditAction(path="/a", command="create", source=EventSource.USER)
    assert spoken(remember([edit])) == [("user", "User requested: Editing /a (create)")]


def test_words_of_an_agent_that_no_reply_led_to() -> None:
    assert spoken(remember([MessageAction(content="hello", source=EventSource.AGENT)])) == [("assistant", "hello")]


PICTURES = ("https://a/1.png", "file:///etc/passwd", "https://a/2.png")
SHOWN = "Images of your message:Image 1:<https://a/1.png>Image 2:<https://a/2.png>"


@pytest.mark.parametrize("text", ["Look.", ""])
def test_images_of_an_agents_own_message_are_shown_behind_it(text: str) -> None:
    message = MessageAction(content=text, source=EventSource.AGENT, image_urls=PICTURES)
    said_before = [("assistant", text)] if text else []
    assert spoken(remember([message])) == [*said_before, ("user", SHOWN)]
    assert spoken(remember([message, said("thanks")])) == [*said_before, ("user", SHOWN), ("user", "\n\nthanks")]
    (*_, pictures) = remember([message], sees_images=False)
    assert pictures.content == (TextPart("Images of your message:"), NOT_SEEN, NOT_SEEN)


@pytest.mark.parametrize("text", ["Look.", ""])
def test_images_of_a_message_that_a_reply_led_to(text: str) -> None:
    core = started()
    reply = ModelReply(id=core.state.version + 1, content=text, seen_id=core.state.version)
    core.append(
        reply, MessageAction(content=text, source=EventSource.AGENT, image_urls=PICTURES, wait_for_response=True)
    )
    said_before = [("assistant", text)] if text else []
    assert shown(core)[: len(said_before) + 1] == [*said_before, ("user", SHOWN if text else f"\n\n{SHOWN}")]


def test_message_unknown_to_a_reply_follows_its_images() -> None:
    core = started()
    seen_id = core.state.version
    core.put(said("wait"))
    core.run()
    reply = ModelReply(id=core.state.version + 1, content="Look.", seen_id=seen_id)
    core.append(reply, MessageAction(content="Look.", source=EventSource.AGENT, image_urls=PICTURES))
    texts = spoken(remember(core.events))
    at = texts.index(("assistant", "Look."))
    assert texts[at + 1] == ("user", SHOWN)
    assert ("user", "\n\nwait") in texts[at + 2 :]


def test_a_persons_own_command_and_its_output() -> None:
    command = CmdRunAction(command="ls", source=EventSource.USER)
    output = CmdOutputObservation(content="a.txt", command="ls", metadata=CmdOutputMetadata(exit_code=0), cause=1)
    assert spoken(remember([command, output])) == [
        ("user", "User executed the command:\nls"),
        (
            "user",
            "\n\n\nObserved result of command executed by user:\na.txt\n[Command finished with exit code 0]",
        ),
    ]


@pytest.mark.parametrize(
    "event",
    [
        NullAction(),
        NullObservation(cause=1),
        SuccessObservation(content="ok"),
        AgentStateChangedObservation(agent_state="paused"),
        AgentStateChangedObservation(agent_state="running"),
        LoopDetectionObservation(content="loop"),
        ModelCallFailed(code="internal"),
        RecallObservation(recall_type=RecallType.KNOWLEDGE),
        AgentDelegateAction(agent="x"),
        MessageAction(content=" ", source=EventSource.AGENT),
        FileWriteObservation(content="written", path="/a"),
    ],
    ids=lambda event: event.kind,
)
def test_what_no_model_sees(event: Event) -> None:
    assert remember([event]) == []


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (ErrorObservation(content="no"), "no\n[Error occurred in processing last action]"),
        (UserRejectObservation(content="no"), "OBSERVATION:\nno\n[Last action has been rejected by the user]"),
        (OutcomeUnknownObservation(content="who knows"), "who knows"),
        (AgentDelegateObservation(content="c", outputs={"content": "o"}), "o"),
        (AgentDelegateObservation(content="c", outputs={"other": "o"}), "c"),
        (FileEditObservation(content="edited", path="/a"), "edited"),
        (
            RecallObservation(
                recall_type=RecallType.KNOWLEDGE,
                repo_instructions="Use tabs.",
                microagent_knowledge=(MicroagentKnowledge(name="git", trigger="git", content="Rebase."),),
            ),
            (
                "<repository_instructions>\nUse tabs.\n</repository_instructions>\n"
                "<skill name='git'>\nThe message mentions 'git'; use this if it helps.\nRebase.\n</skill>"
            ),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Observation) else "",
)
def test_how_observations_read(observation: Observation, text: str) -> None:
    assert spoken(remember([observation])) == [("user", text)]


def test_long_texts_lose_their_middle_but_read_files_do_not() -> None:
    text = "x" * 60 + "y" * 60
    cut = "x" * 20 + TRUNCATION_MARKER + "y" * 20
    assert spoken(remember([OutcomeUnknownObservation(content=text)], max_message_chars=40)) == [("user", cut)]
    assert spoken(remember([FileReadObservation(content=text, path="/a")], max_message_chars=40)) == [("user", text)]


def test_texts_left_in_blobs_are_in_no_prompt() -> None:
    large = FileEditObservation(content="edited", path="/a", old_content="before", new_content="after")
    assert {"old_content", "new_content"} == NEVER_PROMPTED_FIELDS
    assert "before" not in spoken(remember([large]))[0][1]
    assert "after" not in spoken(remember([large]))[0][1]


# Turns


def test_a_call_and_its_result() -> None:
    core = started()
    core.reply(bash(), text="Let me look.")
    core.observe(8)
    assert remember(core.events)[3:] == [
        Message(
            "assistant",
            (TextPart("Let me look."),),
            tool_calls=(ToolCall("c1", "execute_bash", '{"command": "ls", "security_risk": "LOW"}'),),
        ),
        Message(
            "tool",
            (TextPart("a.txt\n[Command finished with exit code 0]"),),
            tool_call_id="c1",
            name="execute_bash",
        ),
    ]


def test_a_turn_with_open_calls_is_not_shown() -> None:
    core = started()
    core.reply(bash(), text="Let me look.")
    assert shown(core) == []


def test_only_answered_calls_of_an_open_turn_are_shown() -> None:
    core = started()
    core.reply(bash(call_id="a"), bash(call_id="b"), text="Both.")
    core.observe(8)
    core.say("hurry")
    assert shown(core) == [
        ("assistant", "Both.[a]"),
        ("tool", "a.txt\n[Command finished with exit code 0](a)"),
        ("user", "hurry"),
    ]


def test_results_come_in_the_order_of_the_calls() -> None:
    core = started()
    core.reply(bash(call_id="a"), bash(call_id="b"))
    core.put(answer(core.event(9), "second"))
    core.put(answer(core.event(8), "first"))
    assert shown(core) == [
        ("assistant", "[a][b]"),
        ("tool", "first\n[Command finished with exit code 0](a)"),
        ("tool", "second\n[Command finished with exit code 0](b)"),
    ]


def test_message_between_call_and_result_follows_the_result() -> None:
    core = started()
    core.reply(bash())
    core.say("hurry")
    core.run()
    core.observe(8)
    assert shown(core) == [
        ("assistant", "[c1]"),
        ("tool", "a.txt\n[Command finished with exit code 0](c1)"),
        ("user", "hurry"),
    ]


def test_message_during_the_model_call_follows_its_answer() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    core.reply(text="Here you are.", seen_id=6)
    assert shown(core) == [("assistant", "Here you are."), ("user", "one more thing")]


def test_message_during_the_model_call_follows_its_results() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    core.reply(bash(), seen_id=6)
    core.say("and another")
    core.run()
    core.observe(11)
    assert shown(core) == [
        ("assistant", "[c1]"),
        ("tool", "a.txt\n[Command finished with exit code 0](c1)"),
        ("user", "one more thing"),
        ("user", "\n\nand another"),
    ]


def test_a_message_the_model_has_seen_stays_before_its_answer() -> None:
    core = started()
    core.say("one more thing")
    core.run()
    core.reply(text="Here you are.")
    assert shown(core) == [("user", "\n\none more thing"), ("assistant", "Here you are.")]


def test_a_thought_and_a_bad_call_have_results() -> None:
    core = started()
    core.reply(think(), call("nope", call_id="n1"))
    assert shown(core) == [
        ("assistant", "[t1][n1]"),
        ("tool", "Your thought has been logged.(t1)"),
        (
            "tool",
            f"{core.event(10).wire()['content']}\n[Error occurred in processing last action](n1)",
        ),
    ]


def test_a_finish_keeps_its_call() -> None:
    core = started()
    core.reply(finish())
    core.say("more")
    core.run()
    assert shown(core) == [("assistant", "[f1]"), ("tool", f"{FINISH_RESULT}(f1)"), ("user", "more")]


def test_a_stopped_turn_has_the_stop_as_its_result() -> None:
    core = started()
    core.reply(bash())
    core.ask("stopped")
    core.run()
    assert shown(core)[1] == (
        "tool",
        "Stop button pressed. The action has not been executed.\n[Error occurred in processing last action](c1)",
    )


@pytest.mark.parametrize("observation", [NullObservation(), SuccessObservation(), OutcomeUnknownObservation()])
def test_a_result_without_a_word_is_still_a_result(observation: Observation) -> None:
    core = started()
    core.reply(bash())
    metadata = ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7)
    core.put(observation.model_copy(update={"cause": 8, "tool_call_metadata": metadata}))
    assert shown(core) == [("assistant", "[c1]"), ("tool", f"{NO_RESULT}(c1)")]


def test_a_late_result_of_a_closed_turn_is_not_shown() -> None:
    core = started()
    core.reply(bash())
    core.ask("stopped")
    core.run()
    before = shown(core)
    core.observe(8)
    assert shown(core) == before


def test_words_without_calls() -> None:
    core = started()
    core.reply(text="Which one?")
    assert shown(core) == [("assistant", "Which one?")]


def test_an_answer_without_a_word_is_not_shown() -> None:
    core = started()
    core.reply(text="  \n")
    assert shown(core) == []


def test_reasoning_blocks_go_along() -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": "s"}
    core = started()
    core.reply(think(), thinking_blocks=(block,))
    assert remember(core.events)[3].thinking_blocks == (block,)


def test_resumed_model_that_spoke_last_is_told_to_continue() -> None:
    core = started()
    core.reply(text="Which one?")
    core.ask("running")
    core.run()
    assert shown(core) == [("assistant", "Which one?"), ("user", CONTINUE)]


def test_model_with_an_answer_is_not_told_to_continue() -> None:
    core = started()
    core.reply(text="Which one?")
    core.say("the red one")
    core.run()
    assert shown(core) == [("assistant", "Which one?"), ("user", "the red one")]


def test_the_same_call_ids_in_two_replies_are_two_calls() -> None:
    core = started()
    for _ in range(2):
        core.reply(bash(call_id="call_0"))
        core.observe(core.state.tools.pending[0].id)
    assert [role for role, _ in shown(core)] == ["assistant", "tool", "assistant", "tool"]


# Remembering


def test_what_was_returned_is_the_callers() -> None:
    memory = ConversationMemory()
    memory.add(with_id(said("x"), 1))
    memory.messages().clear()
    assert len(memory.messages()) == 1


def test_messages_once_shown_are_the_same_objects_later() -> None:
    core = started()
    memory = ConversationMemory()
    before: list[Message] = []
    known = 0
    for _ in range(50):
        core.reply(bash(), think())
        core.observe(core.state.tools.pending[0].id)
        for event in core.events[known:]:
            memory.add(event)
        known = len(core.events)
        now = memory.messages()
        assert all(old is new for old, new in zip(before, now, strict=False))
        assert len(now) == len(before) + 3 + (3 if not before else 0)
        before = now


def test_a_step_costs_what_is_new_however_long_the_history() -> None:
    """Counts the messages made: what was made for earlier steps is not made again."""
    core = started()
    memory = ConversationMemory()
    known: set[int] = set()
    taken = 0
    kept: list[Message] = []  # so that no id is given twice
    made = []
    for _ in range(2_000):
        reply = ModelReply(id=core.state.version + 1, tool_calls=(bash(),), seen_id=core.state.version)
        for event in (reply, *core.agent.events_of(reply)):
            core.put(event)
        core.put(answer(core.event(core.state.tools.pending[0].id)))
        for event in core.events[taken:]:
            memory.add(event)
        taken = len(core.events)
        new = [message for message in memory.messages() if id(message) not in known]
        known |= {id(message) for message in new}
        kept += new
        made.append(len(new))
    assert made == [5, *[2] * 1_999]
    assert len(core.state.tools.pending) == 0
