"""Pictures of the web page: `make screenshots`, or `python -m tests.screenshots FOLDER`.

The conversations in them are made for it; their events are appended as workers would.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from broker.contract.actions import AgentDelegateAction, AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.events import ConfirmationStatus, Event, EventSource, ModelCallDeferred, Tenancy
from broker.contract.file_events import FileEditObservation
from broker.contract.task_list import TaskItem, TaskTrackingAction
from broker.log.event_log import Appended
from broker.specs.agent_state import is_settled
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serving
from tests.broker_parts import claim, enter
from tests.browser_pages import opened
from tests.unit.deckhands.sample_log import command, output, reply, state

DIFF = """--- a/shop/cart.py
+++ b/shop/cart.py
@@ -11,7 +11,7 @@ class Cart:
     def total(self) -> Decimal:
-        return sum(line.price for line in self.lines)
+        return sum(line.price * line.count for line in self.lines)
"""
TESTS = (
    "============ test session starts ============\ncollected 14 items\n\ntests/test_cart.py ......F.......\n\n"
    "FAILED tests/test_cart.py::test_total - assert Decimal('3') == Decimal('6')\n======= 1 failed, 13 passed in 0.42s ======="
)
PLAN = (
    TaskItem(id="1", title="Reproduce the failing test", status="done"),
    TaskItem(id="2", title="Correct the total of the cart", status="in_progress"),
    TaskItem(id="3", title="Run all tests"),
)


def said(text: str) -> MessageAction:
    return MessageAction(content=text, source=EventSource.AGENT)


async def write(store: Store, cid: str, events: Sequence[Event], *, wait_reason: str = "") -> None:
    """Append what a controller worker would."""
    client = Client(store)
    ownership = await claim(store, "controller-1", cid)
    last = next((event.agent_state.value for event in reversed(events) if hasattr(event, "agent_state")), "running")
    fields = {"state": last, "wait_reason": wait_reason, "iterations": 3, "cost_usd": 0.75, "busy": ""}
    last_id = await client.log.last_id(cid)
    outcome = await client.log.append_as_owner(ownership, events, expected_last_id=last_id, fields=fields)
    assert isinstance(outcome, Appended), outcome
    if is_settled(next(event.agent_state for event in reversed(events) if hasattr(event, "agent_state"))):
        return


async def fill(store: Store) -> str:
    """Make conversations; return the one to look at closely."""
    client = Client(store)
    await enter(store, "controller-1")
    for number, (title, end) in enumerate(
        (
            ("Upgrade the HTTP client", "finished"),
            ("Find why the nightly import is slow", "error"),
            ("Write release notes for 4.2", "finished"),
            ("Translate the onboarding mails", "awaiting_user_input"),
        )
    ):
        cid = await client.submit(title, title=title, labels={"team": ("web", "data")[number % 2]})
        await write(store, cid, [state("running"), reply(), said("Done."), state(end)])
    waits = await client.submit("Review", title="Review pull request 1184", tenancy=Tenancy(tenant="acme"))
    deferred = ModelCallDeferred(code="rate_limit", waits_for="openai/*", content="The quota has no room.")
    await write(store, waits, [state("running"), deferred, state("rate_limited")], wait_reason="rate_limit")
    shown = await client.submit(
        "The total of the cart is wrong when a line has more than one piece. Find out why, and correct it.",
        title="The total of the cart is wrong",
        labels={"team": "web", "ticket": "SHOP-311"},
        headless=False,
    )
    first = await client.log.last_id(shown)
    asked = CmdRunAction(
        command="git push origin fix/cart-total", confirmation_state=ConfirmationStatus.AWAITING_CONFIRMATION
    )
    events: list[Event] = [
        state("running"),
        reply(),
        TaskTrackingAction(command="plan", task_list=PLAN),
        command("python -m pytest -q"),
        output(first + 4, TESTS, exit_code=1),
        reply(prompt=2_400),
        said("The total adds the price of each line once, whatever its count."),
        FileEditObservation(content="", path="shop/cart.py", prev_exist=True, diff=DIFF, cause=first + 4),
        AgentDelegateAction(agent="reviewer", inputs={"task": "Read the change, and say what is missing."}),
        reply(prompt=3_100),
        asked,
    ]
    question = state("awaiting_user_confirmation").model_copy(update={"action_id": first + len(events)})
    await write(store, shown, [*events, question])
    done = await client.submit("Tidy", title="Tidy the changelog", labels={"team": "web"})
    await write(store, done, [state("running"), reply(), AgentFinishAction(final_thought="Tidied."), state("finished")])
    return shown


async def take(folder: Path) -> None:
    """Take the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        valkey = EmbeddedValkey(Path(place))
        await valkey.start()
        store = await open_store(valkey.url)
        gateway = Gateway(store, options=ServerOptions(port=0))
        try:
            shown = await fill(store)
            async with serving(gateway) as port:
                for name, path, width, is_dark in (
                    ("conversations", "", 1280, False),
                    ("conversation", f"#/c/{shown}", 1280, False),
                    ("conversation-dark", f"#/c/{shown}", 1280, True),
                    ("conversation-narrow", f"#/c/{shown}", 420, False),
                    ("cluster", "#/cluster", 1280, True),
                ):
                    async with opened(f"http://127.0.0.1:{port}/{path}", width=width, dark=is_dark) as page:
                        await page.locator("tbody tr, .why li").first.wait_for()
                        await page.evaluate("scrollTo(0, 0)")
                        await page.screenshot(path=folder / f"{name}.png")
        finally:
            await gateway.aclose()
            await valkey.stop()


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
