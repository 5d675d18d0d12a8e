"""The model's prompt: from the log to messages."""

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
from controller_worker.memory.conversation_memory import CONTINUE, FINISH_RESULT, NO_RESULT, ConversationMemory
from controller_worker.model.prompt_history import NEVER_PROMPTED_FIELDS
from controller_worker.providers.messages.messages import NOT_SEEN, ImagePart, Message, TextPart, ToolCall
from tests.controller_parts import Core, bash, messages_of, said, started, think
from tests.scenarios import play, scenarios

RESULT = "a.txt\n[Command finished with exit code 0]"
STOPPED = "tool: Stop button pressed. The action has not been executed.\n[Error occurred in processing last action](c1)"


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


def test_prompt_starts_with_the_system_message() -> None:
    core = Core("Fix it.")
    core.run()
    assert spoken(remember(core.events)) == [
        ("system", core.agent.system_prompt(core.state.setup.workspace)),
        ("user", "Fix it."),
        ("user", "\n\nThe workspace is /srv/project.\nToday is 2026-03-01 (UTC)."),
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


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([said("one"), said("two"), said("three")], ["user: one", "user: \n\ntwo", "user: \n\nthree"]),
        ([FileReadAction(path="/a", source=EventSource.USER)], ["user: User requested to read file: /a"]),
        (
            [FileEditAction(path="/a", command="create", source=EventSource.USER)],
            ["user: User requested: Editing /a (create)"],
        ),
        ([MessageAction(content="hello", source=EventSource.AGENT)], ["assistant: hello"]),
        (
            [
                CmdRunAction(command="ls", source=EventSource.USER),
                CmdOutputObservation(content="a.txt", command="ls", metadata=CmdOutputMetadata(exit_code=0), cause=1),
            ],
            [
                "user: User executed the command:\nls",
                f"user: \n\n\nObserved result of command executed by user:\n{RESULT}",
            ],
        ),
    ],
    ids=["blank line between messages", "reading", "editing", "words that no reply led to", "own command"],
)
def test_events_beside_turns(events: list[Event], shown: list[str]) -> None:
    assert [f"{role}: {text}" for role, text in spoken(remember(events))] == shown


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
def test_events_that_no_model_sees(event: Event) -> None:
    assert remember([event]) == []
    recall = RecallObservation(recall_type=RecallType.WORKSPACE_CONTEXT, repo_instructions="Use tabs.")
    assert remember([recall], shows_recalls=False) == []


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
    assert {"old_content", "new_content", "@tokens"} == NEVER_PROMPTED_FIELDS
    assert "before" not in spoken(remember([large]))[0][1]
    assert "after" not in spoken(remember([large]))[0][1]


def test_a_call_and_its_result() -> None:
    core = started()
    core.reply(bash(), text="Let me look.")
    core.observe(8)
    call = ToolCall("c1", "execute_bash", '{"command": "ls", "security_risk": "LOW"}')
    assert remember(core.events)[3:] == [
        Message("assistant", (TextPart("Let me look."),), tool_calls=(call,)),
        Message("tool", (TextPart(RESULT),), tool_call_id="c1", name="execute_bash"),
    ]


@scenarios(
    {
        "a turn with open calls is not shown": ("bash", []),
        "only answered calls of an open turn are shown": (
            "bash+bash, ran 8, say(hurry)",
            ["assistant: [c1]", f"tool: {RESULT}(c1)", "user: hurry"],
        ),
        "results come in the order of the calls": (
            "bash+bash, ran 9, ran 8",
            ["assistant: [c1][c2]", f"tool: {RESULT}(c1)", f"tool: {RESULT}(c2)"],
        ),
        "message between call and result follows the result": (
            "bash, say(hurry), ran 8",
            ["assistant: [c1]", f"tool: {RESULT}(c1)", "user: hurry"],
        ),
        "message during the model call follows its answer": (
            "say(one more thing), late text(Here you are.)",
            ["assistant: Here you are.", "user: one more thing"],
        ),
        "message during the model call follows its results": (
            "say(one more thing), late bash, say(and another), ran 11",
            ["assistant: [c1]", f"tool: {RESULT}(c1)", "user: one more thing", "user: \n\nand another"],
        ),
        "a message the model has seen stays before its answer": (
            "say(one more thing), text(Here you are.)",
            ["user: \n\none more thing", "assistant: Here you are."],
        ),
        "a thought and a bad call have results": (
            "think+nope",
            [
                "assistant: [c1][c2]",
                "tool: Your thought has been logged.(c1)",
                (
                    "tool: Tool nope is not registered. (arguments: {}). Please check the tool name and retry with an "
                    "existing tool.\n[Error occurred in processing last action](c2)"
                ),
            ],
        ),
        "a finish keeps its call": (
            "finish, say(more)",
            ["assistant: [c1]", f"tool: {FINISH_RESULT}(c1)", "user: more"],
        ),
        "a stopped turn has the stop as its result": ("bash, stopped", ["assistant: [c1]", STOPPED]),
        "a late result of a closed turn is not shown": ("bash, stopped, ran 8", ["assistant: [c1]", STOPPED]),
        "an answer without a word is not shown": ("text(  \n)", []),
        "resumed model that spoke last reads that it continues": (
            "text(Which one?), running",
            ["assistant: Which one?", f"user: {CONTINUE}"],
        ),
        "model with an answer reads nothing more": (
            "text(Which one?), say(the red one)",
            ["assistant: Which one?", "user: the red one"],
        ),
        "the same call ids in two replies are two calls": (
            "bash, ran, bash, ran",
            ["assistant: [c1]", f"tool: {RESULT}(c1)"] * 2,
        ),
    }
)
def test_turns(scenario: tuple[str, list[str]]) -> None:
    script, messages = scenario
    assert [f"{role}: {text}" for role, text in shown(play(started(), script))] == messages


@pytest.mark.parametrize("observation", [NullObservation(), SuccessObservation(), OutcomeUnknownObservation()])
def test_a_result_without_a_word_is_still_a_result(observation: Observation) -> None:
    core = started()
    core.reply(bash())
    metadata = ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7)
    core.put(observation.model_copy(update={"cause": 8, "tool_call_metadata": metadata}))
    assert shown(core) == [("assistant", "[c1]"), ("tool", f"{NO_RESULT}(c1)")]


def test_reasoning_blocks_go_along() -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": "s"}
    core = started()
    core.reply(think(), thinking_blocks=(block,))
    assert remember(core.events)[3].thinking_blocks == (block,)


def test_returned_messages_belong_to_the_caller() -> None:
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
