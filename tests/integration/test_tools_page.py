"""The page on tools: its examples are working tools."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from broker.contract.actions import ToolCallAction
from broker.contract.observations import ToolCallObservation
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed
from broker.store.store import Store
from broker.tools.custom_tools import CustomTool
from broker.tools.tool_offers import ToolOffers
from deckhands.client.client import Client
from tool_worker.tools.offered import load_tools

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tools.md"
CONVERSATION = "conversation-1"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The page's examples as the module `shop_tools`."""
    module = types.ModuleType("shop_tools")
    monkeypatch.setitem(sys.modules, "shop_tools", module)
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(example, str(PAGE), "exec"), vars(module))
    return module


async def test_a_function_is_a_tool(shop: types.ModuleType) -> None:
    assert isinstance(shop.stock, CustomTool)
    offered = load_tools(["shop_tools:stock"], ["bash"])
    action = ToolCallAction(id=5, name="stock", arguments={"item": "lamp"})
    answer = await offered.call(action, ActionClaimed(1), CONVERSATION)
    assert isinstance(answer, ToolCallObservation)
    assert answer.outputs == {"Oslo-harbour": 4, "Oslo-station": 0}


async def test_a_class_is_a_tool_that_can_be_checked(shop: types.ModuleType) -> None:
    offered = load_tools(["shop_tools:PlaceOrder"], [])
    action = ToolCallAction(id=5, name="place_order", arguments={"item": "lamp"})
    first = await offered.call(action, ActionClaimed(1), CONVERSATION)
    again = await offered.call(action, ActionReclaimed(2, "t1"), CONVERSATION)
    assert (first.content, again.content) == ("Ordered 1 lamp.", "Had been ordered.")
    assert {f"{CONVERSATION}-5": "lamp"} == shop.PLACED


async def test_a_conversation_keeps_what_it_was_offered(shop: types.ModuleType, memory_store: Store) -> None:
    offers = load_tools(["shop_tools:stock"], []).offers
    await ToolOffers(memory_store).publish(offers)
    client = Client(memory_store)
    conversation_id = await client.submit("Which shop has lamps?", tools=["st*"])
    (created, *_) = await client.events(conversation_id)
    assert created.agent.tools == offers  # type: ignore[attr-defined]
