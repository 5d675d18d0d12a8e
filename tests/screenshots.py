"""Pictures of the web page: `make screenshots`, or `python -m tests.screenshots FOLDER [NAME ...]` for some of them.

The conversations in them are made for it; their events are appended as workers would.
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

from broker.contract.actions import AgentDelegateAction, AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.agent_state import is_settled
from broker.contract.browser_events import BrowserOutputObservation
from broker.contract.events import ConfirmationStatus, Event, EventSource, ModelCallDeferred, Tenancy
from broker.contract.file_events import FileEditObservation
from broker.contract.task_list import TaskItem, TaskTrackingAction
from broker.coordination.membership import Figures, Membership
from broker.limits.governor import Governor
from broker.limits.ledger import Ledger
from broker.limits.quotas import QuotaTable
from broker.log.append_call import Appended
from broker.runtime import StoreRefused, to_millis
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.client.tasks.spec import TaskSpec
from deckhands.evaluation.attempts.catalog import Catalog
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.status import AttemptDetails
from deckhands.operations.monitoring.history import ClusterSample
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from deckhands.operations.webhooks.repository import WebhookRepository
from deckhands.operations.webhooks.webhook import SETTLED
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.broker_parts import claim, enter
from tests.browser_pages import opened
from tests.evaluation_parts import write_evaluation
from tests.server_parts import add_key
from tests.unit.deckhands.sample_log import command, output, reply, state

PLOTTED = "() => (document.querySelector('.tile .line')?.getAttribute('points') || '').split(' ').length >= 9"
"""The plots of a cluster have enough points for a picture."""
KEYS = {
    "conversation-timeline": ("2", ".lane"),
    "conversation-usage": ("3", ".u-legend"),
    "keys": ("?", "dialog"),
}
"""The key that is pressed before a picture is taken, and what it shows."""
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
    client = Client(store)
    ownership = await claim(store, "controller-1", cid)
    last = next((event.agent_state.value for event in reversed(events) if hasattr(event, "agent_state")), "running")
    fields = {"state": last, "wait_reason": wait_reason, "iterations": 3, "cost_usd": 0.75, "busy": ""}
    last_id = await client.log.load_last_id(cid)
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
    first = await client.log.load_last_id(shown)
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
        BrowserOutputObservation(
            content="",
            url="http://localhost:8000/cart",
            trigger_by_action="browse",
            screenshot=picture(640, 300, (11, 95, 165)),
        ),
        AgentDelegateAction(agent="reviewer", inputs={"task": "Read the change, and say what is missing."}),
        reply(prompt=3_100),
        asked,
    ]
    question = state("awaiting_user_confirmation").model_copy(update={"action_id": first + len(events)})
    await write(store, shown, [*events, question])
    done = await client.submit("Tidy", title="Tidy the changelog", labels={"team": "web"})
    await write(store, done, [state("running"), reply(), AgentFinishAction(final_thought="Tidied."), state("finished")])
    return shown


def picture(width: int, height: int, colour: Sequence[int]) -> str:
    """A data URL of a PNG: a page with a bar on top and some lines of text."""

    def row(y: int) -> bytes:
        is_bar, is_line = y < 46, y % 34 < 12 and y > 90
        short = width // 4 + (y // 34 * 137) % (width // 2)
        pixels = (
            colour if is_bar else (203, 210, 219) if is_line and 60 < x < 60 + short else (250, 251, 252)
            for x in range(width)
        )  # fmt: skip
        return b"\0" + b"".join(bytes(pixel) for pixel in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    content = zlib.compress(b"".join(map(row, range(height))))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


MODELS = ("anthropic/claude-sonnet-4-5", "openai/gpt-5")
FAILURES = (
    ("unresolved", ""),
    ("limit", "max_iterations"),
    ("unresolved", ""),
    ("refused", ""),
    ("limit", "max_budget"),
)


def attempts(number: int = 60) -> list[AttemptRow]:
    """Results of two models, one better and dearer than the other."""
    chance, rows = random.Random(7), []
    for at in range(number):
        for model, skill, price in zip(MODELS, (0.82, 0.68), (0.11, 0.06), strict=True):
            is_right = chance.random() < skill
            outcome, cause = ("resolved", "") if is_right else FAILURES[chance.randrange(len(FAILURES))]
            seconds = chance.lognormvariate(4.4, 0.5)
            fields = {"instance": f"shop-{at + 100}", "model": model, "attempt": 1, "outcome": outcome, "cause": cause}
            fields |= {"iterations": chance.randint(4, 30), "cost_usd": price * chance.lognormvariate(0, 0.45)}
            fields |= {
                "seconds": seconds,
                "working_seconds": 0.8 * seconds,
                "waiting_seconds": {"rate_limit": 0.2 * seconds},
            }
            fields |= {"prompt_tokens": chance.randint(20_000, 200_000), "conversation_id": f"attempt-{at}"}
            fields |= {"evidence": "" if is_right else "1 failed, 13 passed: tests/test_cart.py::test_total"}
            rows.append(AttemptRow.model_validate(fields))
    return rows


def in_flight(row: AttemptRow, seconds: float) -> AttemptDetails:
    return AttemptDetails(
        instance=row.instance,
        model=row.model,
        attempt=1,
        state="running",
        waits_for="tool" if seconds > 40 else "",
        worker="",
        seconds=seconds,
        iterations=int(seconds // 6),
        cost_usd=seconds * 0.001,
        conversation_id=row.conversation_id,
    )


QUOTAS = QuotaTable.parse("""
[[quota]]
model = "anthropic/*"
requests_per_minute = 1000
tokens_per_minute = 400000
[[quota]]
model = "openai/*"
concurrency = 1
requests_per_day = 50000
""")


async def work(store: Store, ends: asyncio.Event) -> None:
    """Be workers that take steps, at a rate that changes."""
    figures, chance = Figures(), random.Random(3)
    about = {"node": "n1", "quotas": "\n".join(pool.model for pool in QUOTAS.pools)}
    worker = Membership(store, "n1:controller:41", "controller", about=about, figures=figures)
    tools = Membership(store, "n2:tool:17", "tool", about={"node": "n2", "pools": "bash"})
    for each in (worker, tools):
        await each.register()
    rate = 6.0
    figures.set(conversations=14.0)
    for beat in count(1):
        rate = max(1.0, rate + chance.uniform(-1.2, 1.3))
        figures.add("steps", round(rate))
        figures.add("cost_usd", rate * 0.009, MODELS[0])
        for each in (worker, tools):
            await each.beat(beat)
        if await Catalog(store).find("nightly-shop") is not None:
            await Catalog(store).put("nightly-shop", ())
        if ends.is_set():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(ends.wait(), 1.0)


async def fill_cluster(store: Store) -> None:
    ledger, governor = Ledger(store), Governor(store, QUOTAS)
    await governor.publish()
    for number, cid in enumerate(("q1", "q2", "q3")):
        pool = QUOTAS.pools[0 if number == 0 else 1]
        await governor.reserve(pool, cid, "controller-1", input_tokens=5_200, output_tokens=900)
    for account, limit, spent in (("tenant:acme", 25.0, 23.4), ("tenant:globex", 100.0, 18.75)):
        await ledger.set_limit(account, limit)
        key = store.all_shards[0].budget(account)
        await store.connection.call("HSET", key, "spent", round(spent * 1e9))


async def fill_operations(store: Store) -> None:
    """Make a schedule, a webhook, and a conversation that has crashed its workers and was taken over from them."""
    client = Client(store)
    schedules, webhooks = ScheduleRepository(store, client.secrets), WebhookRepository(store, client.secrets)
    await schedules.add(Schedule(name="nightly-updates", cron="0 6 * * 1-5"), TaskSpec(task="Update the dependencies"))
    await webhooks.add("acme", "https://billing.acme.example/deckhands", (SETTLED,))
    cid = await client.submit("Migrate", title="Migrate the orders table", tenancy=Tenancy(tenant="acme"))
    names = (await store.locate(cid)).shard
    await store.connection.call("ZADD", names.dead, 1, cid)
    now = store.clock.now()
    for number in (3, 2, 1):
        died = str(to_millis(now - timedelta(minutes=number)))
        fields = ("c", cid, "from", f"n{number}:controller:4{number}", "to", "n1:controller:41", "at", died)
        await store.connection.call("XADD", names.takeovers, "*", *fields)
    index = f"{store.all_shards[0].history}:hour"
    chance, value = random.Random(5), 6.0
    samples: list[tuple[str, ...]] = [("DEL", index)]
    for number in range(700, 3, -1):
        value = max(1.0, value + chance.uniform(-0.5, 0.5))
        sample = ClusterSample(steps=value, spend=30 * value, running=round(3 * value), waiting=round(value / 2))
        at = to_millis(now - timedelta(seconds=5 * number)) // 5_000 * 5_000
        samples.append(("XADD", index, f"{at}-0", "v", sample.model_dump_json()))
    with suppress(StoreRefused):  # a server has added its own sample meanwhile
        await store.connection.call_many(samples)


async def take(folder: Path, names: Sequence[str] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        valkey = EmbeddedValkey(Path(place))
        await valkey.start()
        store = await open_store(valkey.url)
        gateway = Gateway(store, options=ServerOptions(port=0))
        try:
            shown = await fill(store)
            fork = await Client(store).fork(shown, at=8, model=MODELS[1], title="The total of the cart: another try")
            await write(
                store, fork, [state("running"), reply(prompt=1_900), said("I multiply in the line."), state("finished")]
            )
            await fill_cluster(store)
            await fill_operations(store)
            rows = attempts()
            busy = [in_flight(row, seconds) for row, seconds in zip(rows[97:101], (81.0, 46.5, 30.0, 4.2), strict=True)]
            await write_evaluation(store, "nightly-shop", rows[:97], total=120, tenant="acme", in_flight=busy)
            await write_evaluation(store, "release-4-2", attempts(30), state="over")
            ends = asyncio.Event()
            working = asyncio.create_task(work(store, ends))
            key = await add_key(store)
            async with serve_in_loop(gateway) as port:
                for name, path, width, height, is_dark in (
                    ("evaluations", "#/evaluations", 1280, 420, False),
                    ("evaluation", "#/e/nightly-shop", 1280, 1240, False),
                    ("evaluation-dark", "#/e/nightly-shop", 1280, 1240, True),
                    ("evaluation-narrow", "#/e/nightly-shop", 390, 1400, False),
                    ("compare", f"#/compare/{shown}/{fork}", 1280, 900, False),
                    ("conversations", "", 1280, 780, False),
                    ("conversations-narrow", "", 390, 900, True),
                    ("search", "#/search/assert", 1280, 520, False),
                    ("search-narrow", "#/search/assert", 390, 780, True),
                    ("conversation", f"#/c/{shown}@7", 1280, 1000, False),
                    ("conversation-dark", f"#/c/{shown}@10", 1280, 1000, True),
                    ("conversation-narrow", f"#/c/{shown}", 390, 844, False),
                    ("conversation-end", f"#/c/{shown}@14", 1280, 1100, False),
                    ("conversation-timeline", f"#/c/{shown}", 1280, 700, False),
                    ("conversation-usage", f"#/c/{shown}", 1280, 1100, False),
                    ("new", "#/new", 1280, 900, False),
                    ("new-narrow", "#/new", 390, 900, True),
                    ("keys", f"#/c/{shown}", 1280, 900, False),
                    ("cluster", "#/cluster", 1280, 1460, False),
                    ("cluster-dark", "#/cluster", 1280, 1460, True),
                    ("cluster-narrow", "#/cluster", 390, 3300, False),
                ):
                    if names and name not in names:
                        continue
                    async with opened(
                        f"http://127.0.0.1:{port}/{path}", width=width, height=height, dark=is_dark, key=key
                    ) as page:
                        await page.locator("tbody tr, .item, .begin, .found li").first.wait_for()
                        if name.startswith("cluster"):
                            await page.wait_for_function(PLOTTED)
                        if "#/c/" in path:
                            await page.locator(".why li").first.wait_for(state="attached")
                        if name in KEYS:
                            await page.keyboard.press(KEYS[name][0])
                            await page.locator(KEYS[name][1]).first.wait_for()
                        await page.evaluate("document.activeElement.blur()")
                        await page.screenshot(path=folder / f"{name}.png")
            ends.set()
            await working
        finally:
            await gateway.aclose()
            await valkey.stop()


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1]), sys.argv[2:]))
