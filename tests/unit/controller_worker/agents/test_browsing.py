"""BrowsingAgent and VisualBrowsingAgent: the actions of their replies, and their prompts."""

import pytest

from broker.contract.actions import AgentFinishAction, AgentRejectAction, MessageAction
from broker.contract.browser_events import BrowseInteractiveAction, BrowserOutputObservation
from broker.contract.events import AgentSpec, Event, EventSource, ModelReply, ModelToolCall, WorkspaceSpec
from broker.contract.observations import ErrorObservation
from broker.contract.specs import OutputSpec
from controller_worker.agents.agent import should_show_pages
from controller_worker.agents.browsing import BROWSER_ACTIONS, BrowsingAgent, VisualBrowsingAgent
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.registry import create_agent
from controller_worker.core.effects import AwaitTools, CallModel, Rest
from tests.controller_parts import bash, call, check_replay, messages_of, started
from tool_worker.host.browser.action_strings import ACTIONS


def events(text: str) -> list[Event]:
    return BrowsingAgent(AgentSpec()).events_of(ModelReply(id=7, content=text))


def told(text: str) -> str:
    """Return the user's message after a reply that contains only text."""
    message, finish = events(text)
    assert isinstance(message, MessageAction)
    assert isinstance(finish, AgentFinishAction)
    assert finish.outputs == {"content": message.content}
    assert message.source is EventSource.AGENT
    return message.content


@pytest.mark.parametrize(
    ("written", "actions"),
    [
        ("I search.\n```fill('17', 'x')```", "fill('17', 'x')"),
        ("I search.\n```python\nfill('17', 'x')\nclick('18')\n```\nThen I read.", "fill('17', 'x')\nclick('18')"),
        ("I search. ```click('3')", "click('3')"),
        ("I search. ```click('3'", "click('3')"),
        ("I search. ```click('3'))```", "click('3')"),
        ("I search. click('81')", "click('81')"),
        ("I search.\nfill('17', 'x')\nclick('18'))\n", "fill('17', 'x')\nclick('18')"),
        ("I search. `click('81')`.", "click('81')"),
        ("I search. ```click(``` and more ```click('4')```", "click("),
    ],
)
def test_an_action_stands_between_backticks(written: str, actions: str) -> None:
    (event,) = events(written)
    assert isinstance(event, BrowseInteractiveAction)
    assert (event.browser_actions, event.thought) == (actions, "I search.")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("It opens at 9.", "It opens at 9."),
        ("Found.\n```send_msg_to_user('It opens at 9.')```", "It opens at 9."),
        ("```send_msg_to_user(text='It opens at 9.')```", "It opens at 9."),
        ("```send_msg_to_user('It's open')```", "It's open"),
        ("```send_msg_to_user('It opens at 9.'))```", "It opens at 9."),
        ("```send_msg_to_user('It's open (today)'))```", "It's open (today)"),
        ("Found. send_msg_to_user('It opens at 9.')", "It opens at 9."),
        ("send_msg_to_user('It's open')", "It's open"),
        ("It has main() and\nunclick('3')", "It has main() and\nunclick('3')"),
        ("click('3') opens it", "click('3') opens it"),
        ("```send_msg_to_user('cut off in the mid", "cut off in the mid"),
        ("```send_msg_to_user(9)```", "9"),
        ("```send_msg_to_user(answer)```", ""),
    ],
)
def test_message_to_the_user_ends_the_task(written: str, words: str) -> None:
    assert told(written) == words


def test_actions_before_a_message_run_first() -> None:
    doing, message, finish = events("```click('3')\nsend_msg_to_user('bought')```")
    assert isinstance(doing, BrowseInteractiveAction)
    assert (doing.browser_actions, doing.browsergym_send_msg_to_user) == ("click('3')", "bought")
    assert isinstance(message, MessageAction)
    assert isinstance(finish, AgentFinishAction)
    assert finish.outputs == {"content": "bought"}


def test_a_task_can_be_given_up() -> None:
    (event,) = events("No way in.\n```report_infeasible('it needs a login')```")
    assert isinstance(event, AgentRejectAction)
    assert (event.thought, event.outputs) == ("No way in.", {"reason": "it needs a login"})


@pytest.mark.parametrize("called", [bash(), call("finish", '{"message": "three", "output": {"n": 3}}')])
def test_a_tool_that_was_not_offered_is_refused(called: ModelToolCall) -> None:
    assert BrowsingAgent(AgentSpec()).tools == ()
    (event,) = BrowsingAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=(called,)))
    assert isinstance(event, ErrorObservation)
    assert event.content.startswith(f"Tool {called.name} is not registered.")


OUTPUT = OutputSpec(json_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
HANDED_IN = call("finish", '{"message": "three", "output": {"n": 3}}')


@pytest.mark.parametrize("name", ["BrowsingAgent", "VisualBrowsingAgent"])
def test_output_is_submitted_by_the_only_tool(name: str) -> None:
    core = started(agent=AgentSpec(name=name, output=OUTPUT))
    assert core.agent.tools == (make_finish_tool(OUTPUT),)
    look = core.reply(text="I look.\n```goto('http://localhost/')```")
    assert isinstance(look, AwaitTools)
    assert core.observe(look.action_ids[0]) == CallModel(2, 1)
    assert core.reply(text="There are three.") == CallModel(3, 1)
    assert "- /: 'n' is missing" in core.events[-1].content  # type: ignore[attr-defined]
    assert core.reply(call("finish", '{"message": "", "output": {"n": "3"}}')) == CallModel(4, 1)
    assert "- /n: has to be of the type integer" in core.events[-1].content  # type: ignore[attr-defined]
    assert core.reply(HANDED_IN) == Rest()
    done = core.event(-2, AgentFinishAction)
    assert (done.outputs, done.final_thought) == ({"n": 3}, "three")
    assert core.states() == ["running", "finished"]
    check_replay(core)


def test_a_schema_that_words_satisfy_is_satisfied_by_them() -> None:
    schema = {"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]}
    core = started(agent=AgentSpec(name="BrowsingAgent", output=OutputSpec(json_schema=schema)))
    assert core.reply(text="It opens at 9.") == Rest()
    assert core.states() == ["running", "finished"]


NETWORK = WorkspaceSpec(network=True)


@pytest.mark.parametrize(
    ("agent", "workspace", "says", "does_not_say"),
    [
        (
            BrowsingAgent(AgentSpec(system_prompt_suffix="Be quick.")),
            WorkspaceSpec(),
            ["It has no access to the network", "drag_and_drop(from_bid, to_bid)", "\n\nBe quick."],
            ["new_tab()", "`finish`"],
        ),
        (
            BrowsingAgent(AgentSpec()),
            NETWORK,
            ["send_msg_to_user(text): give the answer"],
            ["no access to the network"],
        ),
        (
            BrowsingAgent(AgentSpec(output=OUTPUT)),
            NETWORK,
            ["call the tool `finish` with the output that it describes"],
            ["send_msg_to_user"],
        ),
        (
            VisualBrowsingAgent(AgentSpec()),
            NETWORK,
            ["new_tab(), tab_close(), tab_focus(index)", "You also see a picture"],
            ["no access to the network"],
        ),
    ],
    ids=["without network", "with network", "with an output", "visual"],
)
def test_prompt(agent: BrowsingAgent, workspace: WorkspaceSpec, says: list[str], does_not_say: list[str]) -> None:
    prompt = agent.system_prompt(workspace)
    assert [text for text in says if text not in prompt] == []
    assert [text for text in does_not_say if text in prompt] == []
    assert set(ACTIONS) == set(BROWSER_ACTIONS)


def test_models_that_get_pictures() -> None:
    assert not should_show_pages(create_agent(AgentSpec(name="BrowsingAgent")))
    assert should_show_pages(create_agent(AgentSpec(name="VisualBrowsingAgent")))
    assert should_show_pages(CodeActAgent(AgentSpec()))


def test_thoughts_and_pages_alternate_in_the_prompt() -> None:
    reply = ModelReply(id=1, content="I look.\n```goto('http://a')```")
    (doing,) = BrowsingAgent(AgentSpec()).events_of(reply)
    page = BrowserOutputObservation(
        id=3, url="http://a", trigger_by_action="browse_interactive", content="the page", cause=2
    )
    messages = messages_of((reply, doing.model_copy(update={"id": 2}), page))
    assert [(message.role, message.content[0].text[:8]) for message in messages] == [  # type: ignore[union-attr]
        ("assistant", "I look.\n"),
        ("user", "the page"),
    ]
