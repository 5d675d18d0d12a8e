"""The pictures that reach each model: of pages and other tools, by the model's abilities and the agent's settings."""

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
from controller_worker.providers.messages.messages import ImagePart
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
    parts = [part for message in question.request.messages for part in message.content]
    return [part.url for part in parts if isinstance(part, ImagePart)]


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
    await hands.begin(LOOK, {"text": "seen"}, agent=hands.agent(enable_browsing=True))
    loop = await hands.go()
    (action,) = [event for event in await hands.events() if isinstance(event, BrowseInteractiveAction)]
    shown = {"url": "http://a", "content": "tree", "set_of_marks": MARKS}
    page = BrowserOutputObservation(trigger_by_action="browse_interactive", **shown)
    await hands.log.append_observation(CID, to_answer(action, page), worker_id="tool-1")
    await hands.wake(loop)
    assert await pictures(hands, model, **fields) == ([MARKS] if is_shown else [])
