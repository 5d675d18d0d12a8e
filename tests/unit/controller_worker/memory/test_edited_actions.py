"""An action that a user edited before confirming it: the model reads the executed action, the same at every reading."""

from typing import Any

from broker.contract.actions import ChangeAgentStateAction, CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, EventSource
from broker.contract.policies import ConfirmationPolicy
from broker.contract.task_list import PlanAction
from controller_worker.core.effects import AwaitTools
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.turn import MAX_EDITED_CHARS, render_edit
from controller_worker.providers.messages.messages import Message, TextPart
from tests.controller_parts import Core, bash, started


def confirmed(core: Core, **edited: Any) -> None:
    """Confirm what is asked about, and let a tool worker answer what runs."""
    core.put(ChangeAgentStateAction(agent_state=AgentState.USER_CONFIRMED, edited=edited, source=EventSource.USER))
    wanted = core.run()
    assert isinstance(wanted, AwaitTools)
    core.observe(wanted.action_ids[0])


def asking() -> Core:
    return started(agent=AgentSpec(confirmation=ConfirmationPolicy(mode="always", analyzer="none")))


def messages(core: Core, *, is_asked_at_each_event: bool = False) -> list[Message]:
    memory = ConversationMemory()
    for event in core.events:
        memory.add(event)
        if is_asked_at_each_event:
            memory.messages()
    return memory.messages()


def results(core: Core) -> list[str]:
    found = [message.content[0] for message in messages(core) if message.role == "tool"]
    return [part.text for part in found if isinstance(part, TextPart)]


def test_the_result_says_what_ran_instead() -> None:
    core = asking()
    core.reply(bash("rm -r build"))
    confirmed(core, command="rm -r build/tmp")
    (told,) = results(core)
    assert told.startswith(
        "A person changed this action before it ran. What ran has:\ncommand: rm -r build/tmp\n\na.txt"
    )
    (call,) = (call for message in messages(core) for call in message.tool_calls)
    assert "rm -r build/tmp" not in call.arguments


def test_it_reads_the_same_whenever_it_is_read() -> None:
    core = asking()
    core.reply(bash("rm -r build"), bash("ls", "c2"))
    confirmed(core, command="rm -r build/tmp")
    confirmed(core)
    assert messages(core) == messages(core, is_asked_at_each_event=True)
    first, second = results(core)
    assert "A person changed" in first
    assert "A person changed" not in second


def test_unedited_confirmation_is_not_mentioned() -> None:
    core = asking()
    core.reply(bash("ls"), text="Look first.")
    confirmed(core, command="ls")
    (told,) = results(core)
    assert told.startswith("a.txt")


def test_long_values_lose_their_middle_and_other_values_are_json() -> None:
    asked = CmdRunAction(command="ls")
    told = render_edit(asked, asked.model_copy(update={"command": "x" * 9_000, "timeout": 5.0, "blocking": True}))
    assert len(told) < MAX_EDITED_CHARS + 300
    assert "timeout: 5.0" in told
    assert "blocking: true" in told


def test_a_plan_says_itself_how_it_was_changed() -> None:
    assert render_edit(PlanAction(plan="a"), PlanAction(plan="b")) == ""
