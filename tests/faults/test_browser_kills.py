"""A tool worker killed while the browser acts: the browser continues, and what it showed is collected once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.browser_events import BrowserOutputObservation
from broker.contract.events import AgentSpec, Event, LLMSpec, Observation
from broker.contract.observations import AgentDelegateObservation
from broker.contract.specs import OutputSpec
from broker.log.delegates import make_delegate_id
from tests.browser_parts import opened_site
from tests.faults.harness import FaultCluster

POOLS = {"DECKHANDS_POOLS": "bash,browser"}
START_LIMIT_SECONDS = 180.0


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


async def pages(cluster: FaultCluster, conversation_id: str) -> list[Event]:
    """The one answer of each action in the browser."""
    events = await cluster.client.events(conversation_id)
    shown = []
    for action in [event for event in events if event.kind == "action.browse_interactive"]:
        (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
        shown.append(answer)
    return shown


@pytest.mark.slow
async def test_a_page_that_loads_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        site.page("/never", "<h1>At last</h1>")
        cluster.start_controller()
        cluster.start_tool("victim", **POOLS)
        script = turns(f"```goto('{site.url('/never')}')```", "```send_msg_to_user('It was slow.')```")
        (conversation_id,) = await cluster.submit(script, name="BrowsingAgent")
        await cluster.until(site.held.is_set, what="the page", limit=START_LIMIT_SECONDS)
        cluster.kill("victim")
        cluster.start_tool("survivor", **POOLS)
        site.released.set()
        await cluster.settle([conversation_id], limit=START_LIMIT_SECONDS)
        (page,) = await pages(cluster, conversation_id)
        assert isinstance(page, BrowserOutputObservation)
        assert "heading 'At last'" in page.content
        assert [asked for asked in site.asked if asked == "/never"] == ["/never"]
        events = await cluster.client.events(conversation_id)
        (finish,) = [event for event in events if event.kind == "action.finish"]
        assert finish.outputs == {"content": "It was slow."}  # type: ignore[attr-defined]


async def test_click_before_a_worker_death_is_not_repeated(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        url = site.page("/order", "<form action=/form method=post><button>Order</button></form>")
        cluster.start_controller()
        cluster.start_tool("victim", DECKHANDS_FAILPOINTS="tool.after_result:kill@2", **POOLS)
        order = {"name": "browser", "arguments": {"code": f"goto('{url}')"}}
        click = {"name": "browser", "arguments": {"code": "click('6')"}}
        finish = {"name": "finish", "arguments": {"message": "ordered"}}
        script = [{"tool_calls": [call]} for call in (order, click, finish)]
        (conversation_id,) = await cluster.submit(script, enable_browsing=True)
        assert await cluster.until_ended("victim", limit=START_LIMIT_SECONDS) == -9
        cluster.start_tool("survivor", **POOLS)
        await cluster.settle([conversation_id], limit=START_LIMIT_SECONDS)
        first, second = await pages(cluster, conversation_id)
        assert isinstance(first, BrowserOutputObservation)
        assert "[6] button 'Order'" in first.content
        assert first.set_of_marks.startswith("data:image/jpeg;base64,")
        assert isinstance(second, BrowserOutputObservation)
        assert "Thank you." in second.content
        assert len(site.forms) == 1


HOURS = OutputSpec(json_schema={"type": "object", "properties": {"opens": {"type": "integer"}}, "required": ["opens"]})


@pytest.mark.soak
async def test_what_a_browsing_delegate_has_found_reaches_its_parent_once(cluster: FaultCluster) -> None:
    async with opened_site() as site:
        url = site.page("/library", "<h1>Library</h1><p>Opens at nine.</p>")
        cluster.start_controller()
        cluster.start_tool("victim", DECKHANDS_FAILPOINTS="tool.after_result:kill@1", **POOLS)
        script = cluster.root / "browsing.json"
        told = [{"tool_calls": [{"name": "finish", "arguments": {"message": "Found.", "output": {"opens": 9}}}]}]
        script.write_text(json.dumps({"turns": [*turns(f"I look.\n```goto('{url}')```", "At nine."), *told]}))
        browsing = AgentSpec(name="BrowsingAgent", llm=LLMSpec(model=f"scripted/{script}"), output=HOURS)
        ask = {"name": "delegate_to_browsing_agent", "arguments": {"task": f"When does {url} say it opens?"}}
        (conversation_id,) = await cluster.submit(
            [{"tool_calls": [ask]}], enable_browsing_delegate=True, delegates={"BrowsingAgent": browsing}
        )
        assert await cluster.until_ended("victim", limit=START_LIMIT_SECONDS) == -9
        cluster.start_tool("survivor", **POOLS)
        await cluster.settle([conversation_id], limit=START_LIMIT_SECONDS)
        asked, answer = [
            event for event in await cluster.client.events(conversation_id) if event.kind.endswith(".delegate")
        ]
        delegate_id = make_delegate_id(conversation_id, asked.id)
        (page,) = await pages(cluster, delegate_id)
        assert isinstance(page, BrowserOutputObservation)
        assert "heading 'Library'" in page.content
        assert [path for path in site.asked if path == "/library"] == ["/library"]
        refused = [e for e in await cluster.client.events(delegate_id) if e.kind == "observation.finish_refused"]
        assert ["'opens' is missing" in event.content for event in refused] == [True]  # type: ignore[attr-defined]
        assert isinstance(answer, AgentDelegateObservation)
        assert answer.outputs == {"opens": 9}


async def test_a_worker_without_a_browser_says_so(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool()
    script = turns("```goto('http://localhost/')```", "```send_msg_to_user('There is no browser.')```")
    (conversation_id,) = await cluster.submit(script, name="BrowsingAgent")
    await cluster.settle([conversation_id], limit=START_LIMIT_SECONDS)
    (answer,) = await pages(cluster, conversation_id)
    assert answer.kind == "observation.error"
    assert "the workspace has no tool 'browser': its tool worker does not serve a pool of that name" in answer.content  # type: ignore[attr-defined]
