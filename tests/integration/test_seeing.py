"""Which pictures reach which model: of pages and of other tools, by what the model sees and the agent wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker.contract.browser_events import BrowseInteractiveAction, BrowserOutputObservation
from broker.contract.events import AgentSpec, LLMSpec
from broker.runtime.clock import SystemClock
from controller_worker.agents.registry import create_agent
from controller_worker.model.models import Models
from controller_worker.model.prompt_history import PromptHistory
from controller_worker.model.question import Question, next_question
from controller_worker.providers.messages.messages import ImagePart, Message
from tests.conversation_hands import CID, Hands
from tool_worker.tools.tool import to_answer

MARKS = f"data:image/jpeg;base64,/9j/{'B' * 60_000}"
LOOK = {"tool_calls": [{"name": "browser", "arguments": {"code": "goto('http://a')"}}]}
SEEING, BLIND = "openai/gpt-4o", "deepseek/deepseek-chat"


async def pictures(hands: Hands, model: str, **fields: Any) -> list[str]:
    """The pictures in the prompt that this model is asked with, after a page was shown."""
    spec = AgentSpec(enable_browsing=True, **{"llm": LLMSpec(model=model), **fields})
    state = hands.loops[0].state
    question = await next_question(
        replace(state, setup=replace(state.setup, agent=spec)),
        create_agent(spec),
        PromptHistory(hands.log, CID),
        Models({}, SystemClock(), is_open=True),
    )
    assert isinstance(question, Question)
    return [part.url for message in question.request.messages for part in _parts(message)]


def _parts(message: Message) -> list[ImagePart]:
    return [part for part in message.content if isinstance(part, ImagePart)]


@pytest.mark.parametrize(
    ("model", "fields", "is_shown"),
    [
        (SEEING, {}, True),
        (SEEING, {"name": "VisualBrowsingAgent"}, True),
        (SEEING, {"name": "BrowsingAgent"}, False),
        (SEEING, {"enable_som_visual_browsing": False}, False),
        (BLIND, {}, False),
    ],
)
async def test_page_reaches_a_model_that_sees_pictures(
    hands: Hands, model: str, fields: dict[str, Any], is_shown: bool
) -> None:
    spec = AgentSpec(enable_browsing=True)
    await hands.begin(LOOK, {"text": "seen"}, agent=spec.model_copy(update={"llm": _script(hands)}))
    loop = await hands.go()
    (action,) = [event for event in await hands.events() if isinstance(event, BrowseInteractiveAction)]
    page = BrowserOutputObservation(
        url="http://a", trigger_by_action="browse_interactive", content="tree", set_of_marks=MARKS
    )
    await hands.log.append_observation(CID, to_answer(action, page), worker_id="tool-1")
    loop.wake()
    await hands.at_rest(loop)
    assert await pictures(hands, model, **fields) == ([MARKS] if is_shown else [])


def _script(hands: Hands) -> LLMSpec:
    return LLMSpec(model=f"scripted/{hands.folder / 'script.json'}")
