"""A conversation as a workplace in headless Chromium: reading, finding, starting, and hostile texts of a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from broker.contract.actions import AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.events import Event, EventSource, ModelReply, TokenUsage
from broker.contract.file_events import FileEditAction, FileEditObservation
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from tests.broker_parts import claim, enter
from tests.browser_pages import CHROMIUM, TOO_WIDE, opened
from tests.screenshots import DIFF, picture
from tests.server_parts import Served, served
from tests.unit.deckhands.sample_log import command, output, reply, state

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")

NARROW = 390
HOSTILE_MARKDOWN = """# Title <script>window.broken = 1</script>
<iframe src="https://evil.example/frame"></iframe><img src=x onerror="window.broken = 1">
<svg onload="window.broken = 1"><style>body { display: none }</style></svg>
<form action="https://evil.example/"><input name="key"><button formaction="https://evil.example/">Sign in</button></form>

<a href="javascript:window.broken = 1">script link</a> [markdown script](javascript:window.broken=1)
[data link](data:text/html;base64,PHNjcmlwdD4=) [elsewhere](https://evil.example/page)
![tracker](https://evil.example/pixel.png) <div style="position: fixed; inset: 0" id="main">over it</div>
<meta http-equiv="refresh" content="0; url=https://evil.example/">

\u202eabc &#x202e;def &#8203;
[login.example.com](https://login.example.co/in) [https://good.example](https://good.example.evil.example/)
[https://good.example/@evil.example](https://evil.example/) [help](mailto:thief@evil.example) https://good.example/docs

| a | b |
|---|---|
| 1 | **bold** |

```python
def total(self) -> int:
    return 1
```
"""
REQUESTED = "() => performance.getEntriesByType('resource').map((one) => new URL(one.name).host)"
LEFT_WHILE_SCROLLING = """() => {
  const list = document.querySelector(".timeline");
  list.scrollTop -= 500;
  location.hash = "#/";
  dispatchEvent(new Event("hashchange"));
  list.dispatchEvent(new Event("scroll"));
}"""
"""The scroll is reported after the list has gone, as in the frame that follows."""
FIRST_SHOWN = "Math.min(...[...document.querySelectorAll('.item[data-first]')].map((one) => Number(one.dataset.first)))"


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs) as found:
        await enter(found.client.store, "controller-1")
        yield found


OWNED: dict[str, Any] = {}
"""The ownership of each conversation that a test writes to."""


async def append(server: Served, cid: str, events: Sequence[Event], **fields: Any) -> None:
    if cid not in OWNED:
        OWNED[cid] = await claim(server.client.store, "controller-1", cid)
    ownership = OWNED[cid]
    last_id = await server.client.log.load_last_id(cid)
    await server.client.log.append_as_owner(ownership, events, expected_last_id=last_id, fields=fields)


def says(text: str) -> ModelReply:
    return ModelReply(model="acme/large", content=text, usage=TokenUsage(prompt_tokens=10), cost_usd=0.25)


async def test_hostile_markdown_runs_and_loads_nothing(server: Served) -> None:
    cid = await server.client.submit(HOSTILE_MARKDOWN)
    await append(server, cid, [state("running"), says(HOSTILE_MARKDOWN), AgentFinishAction(final_thought="End.")])
    asked: list[str] = []
    async with opened(f"{server.url}/#/c/{cid}", height=4_000, key=await server.token("*")) as page:
        page.on("request", lambda request: asked.append(request.url))
        said = page.locator(".item.step .md").first
        await said.get_by_role("cell", name="bold").wait_for()
        await page.locator(".hljs-keyword").first.wait_for()
        assert await page.evaluate("window.broken") is None
        forbidden = "main :is(script, iframe, svg[onload], style, form form, meta, object, [style*=fixed])"
        assert await page.locator(forbidden).count() == 0
        assert await said.locator("img, input, button, [id], [onerror], [style]").count() == 0
        links = await said.locator("a").evaluate_all("all => all.map((one) => [one.getAttribute('href'), one.rel])")
        assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
        assert links[0][0] == "https://evil.example/page"
        hosts = ["evil.example", "login.example.co", "good.example.evil.example", "evil.example", "thief@evil.example"]
        assert await said.locator("a + .host").all_inner_texts() == [f" ({host})" for host in hosts]
        text = await said.inner_text()
        assert "picture: https://evil.example/pixel.png" in text
        assert text.count("\\u202e") == 2
        assert not {"\u202e", "\u200b"} & set(text)
        assert not [url for url in asked if not url.startswith(server.url)]
        assert set(await page.evaluate(REQUESTED)) == {server.url.removeprefix("http://")}


async def test_step_is_one_card_that_says_each_text_once(server: Served) -> None:
    cid = await server.client.submit("Look around", title="Steps")
    last = await server.client.log.load_last_id(cid)
    long = "\n".join(f"line {number}" for number in range(200))
    timed_out = CmdOutputMetadata(suffix="\n[The command timed out after 5 seconds. You may wait longer to see more.]")
    events = [
        state("running"),
        says("I look at the files."),
        MessageAction(content="I look at the files.", source=EventSource.AGENT),
        CmdRunAction(command="cat long.txt", thought="I look at the files."),
        output(last + 4, long),
        says("I change it."),
        FileEditAction(path="shop/cart.py", command="str_replace", old_str="a", new_str="b"),
        FileEditObservation(content="", path="shop/cart.py", prev_exist=True, diff=DIFF, cause=last + 7),
        says(""),
        command("sleep 9"),
        CmdOutputObservation(
            cause=last + 10, command="sleep 9", content="", metadata=timed_out, source=EventSource.ENVIRONMENT
        ),
        says(""),
        command("never"),
        says("All is well."),
        AgentFinishAction(final_thought="All is well."),
        state("finished"),
    ]
    await append(server, cid, events, state="finished")
    async with opened(f"{server.url}/#/c/{cid}", height=3_000, key=await server.token("*")) as page:
        await page.locator(".item.step").nth(4).wait_for()
        assert await page.locator(".item.step").count() == 5
        main = page.get_by_role("log")
        assert await main.get_by_text("I look at the files.").count() == 1
        assert await main.get_by_text("All is well.").count() == 1
        await main.get_by_text("timed out", exact=True).wait_for()
        await main.get_by_text("no result, not run to its end", exact=True).wait_for()
        row = page.locator(".diff2 tr.change")
        assert "line.price for" in await row.locator("td.minus").inner_text()
        assert "line.count for" in await row.locator("td.plus").inner_text()
        assert await main.get_by_text("line 100", exact=True).count() == 0
        await page.get_by_role("button", name="Show all 200 lines").click()
        await page.get_by_role("searchbox", name="Search in this output").fill("line 19")
        await page.get_by_text("11 of 200 lines").wait_for()
        await page.locator(".item.step").first.get_by_text("4 events").click()
        await page.get_by_text("model.reply", exact=True).first.wait_for()


async def test_search_filter_errors_and_outline_lead_to_steps(server: Served) -> None:
    cid = await server.client.submit("Find it", title="Finding")
    last = await server.client.log.load_last_id(cid)
    events: list[Event] = [state("running")]
    for number in range(300):
        events += [says(f"Thought {number}"), command(f"echo {number}")]
        events.append(output(last + len(events), f"needle-{number}", exit_code=1 if number in (50, 200) else 0))
    await append(server, cid, events)
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.get_by_text("needle-299").wait_for()
        await page.get_by_role("button", name="2 errors").wait_for()
        await page.keyboard.press("/")
        await page.keyboard.type("needle-123")
        await page.get_by_text("1 of 1").wait_for()
        await page.get_by_text("needle-123", exact=True).wait_for()
        await page.get_by_role("searchbox", name="Search in the log").fill("no such thing")
        await page.get_by_text("nothing found").wait_for()
        await page.get_by_role("searchbox", name="Search in the log").press("Escape")
        await page.keyboard.press("G")
        await page.get_by_text("needle-299").wait_for()
        await page.keyboard.press("g")
        await page.keyboard.press("e")
        await page.get_by_text("needle-50", exact=True).wait_for()
        await page.keyboard.press("e")
        await page.get_by_text("needle-200", exact=True).wait_for()
        await page.get_by_label("Show", exact=True).select_option("bad")
        await page.get_by_text("needle-50", exact=True).wait_for()
        assert await page.locator(".item").count() == 2
        await page.get_by_label("Show", exact=True).select_option("")
        await page.locator(".outline").get_by_role("link", name="Find it").click()
        await page.locator(".item.user.current").wait_for()
        await page.goto(f"{server.url}/#/c/{cid}@{last + 305}")
        await page.get_by_text("needle-101", exact=True).wait_for()


async def test_tail_is_followed_until_the_reader_scrolls_away(server: Served) -> None:
    cid = await server.client.submit("Run", title="Tail")
    await append(
        server, cid, [state("running"), *(said for number in range(100) for said in (says(f"Thought {number}"),))]
    )
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.get_by_text("Thought 99", exact=True).wait_for()
        await append(server, cid, [says("\n".join(f"* tall {line}" for line in range(40)))])
        await page.get_by_text("tall 39").wait_for()
        gap = "() => { const one = document.querySelector('.timeline'); return one.scrollHeight - one.scrollTop - one.clientHeight; }"
        await page.wait_for_function(f"({gap})() < 2")
        await page.locator(".timeline").hover()
        await page.mouse.wheel(0, -2_500)
        await page.get_by_role("button", name="To the end").wait_for()
        await page.wait_for_function(f"({FIRST_SHOWN}) < 90")
        first = await page.evaluate(FIRST_SHOWN)
        await append(server, cid, [says("News at the end")])
        await page.get_by_text("102 ", exact=False).first.wait_for(state="attached")
        assert await page.get_by_text("News at the end").count() == 0
        assert await page.evaluate(FIRST_SHOWN) == first
        await page.get_by_role("button", name="To the end").click()
        await page.get_by_text("News at the end").wait_for()


async def test_list_that_is_left_while_it_scrolls_fails_nothing(server: Served) -> None:
    cid = await server.client.submit("Run", title="Left")
    await append(server, cid, [state("running"), *(says(f"Thought {number}") for number in range(100))])
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.get_by_text("Thought 99", exact=True).wait_for()
        await page.evaluate(LEFT_WHILE_SCROLLING)
        await page.get_by_role("heading", name="Conversations").wait_for()
        await page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def test_few_cards_exist_of_a_long_conversation(server: Served) -> None:
    cid = await server.client.submit("Long", title="Long")
    for batch in range(4):
        await append(server, cid, [says(f"Step {batch}-{number} " + "x" * 500) for number in range(1_000)])
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.get_by_text("Step 3-999").wait_for()
        await page.get_by_text("40,000", exact=False).first.wait_for(state="attached")
        await page.get_by_role("tab", name="Timeline").click()
        await page.locator(".lane").first.wait_for()
        await page.get_by_role("tab", name="Log").click()
        await page.keyboard.press("g")
        await page.locator("#i1:focus").wait_for()
        assert await page.locator(".item").count() < 60


async def test_long_texts_and_pictures_are_fetched_when_shown(server: Served) -> None:
    cid = await server.client.submit("Big", title="Big")
    shot = picture(400, 300, (11, 95, 165)) + "A" * 8  # longer than the page keeps
    assert len(shot) < 8_000
    big = "\n".join(f"row {number} " + "y" * 100 for number in range(4_000))
    last = await server.client.log.load_last_id(cid)
    noisy = f"data:image/png;base64,{'A' * 40_000}"
    asked = MessageAction(content="See", source=EventSource.USER, image_urls=(noisy,))
    await append(server, cid, [state("running"), says(""), command("cat big"), output(last + 3, big), asked])
    async with opened(f"{server.url}/#/c/{cid}", height=2_000, key=await server.token("*")) as page:
        source = page.locator(".item.user .shots img")
        await source.wait_for(state="attached")
        assert await source.get_attribute("src") == noisy
        await page.get_by_role("button", name="Show all").first.click()
        await page.get_by_role("searchbox", name="Search in this output").wait_for()
        shown = await server.client.events(cid)
        lines = next(event for event in shown if isinstance(event, CmdOutputObservation)).content.count("\n") + 1
        await page.get_by_role("searchbox", name="Search in this output").fill("row")
        await page.get_by_text(f"of {lines:,} lines").wait_for()


async def test_person_starts_repeats_and_is_told_what_is_wrong(server: Served) -> None:
    async with opened(f"{server.url}/", key=await server.token("acme")) as page:
        await page.get_by_role("link", name="New conversation").click()
        await page.get_by_label("Task").fill("Count **all** files")
        await page.get_by_label("Workspace").fill("no/absolute/path")
        await page.get_by_label("Labels").fill("team=web ticket=4711")
        await page.get_by_label("Steps").fill("7")
        await page.get_by_label("Cost in $").fill("0.5")
        await page.get_by_role("button", name="Start").click()
        await page.get_by_role("alert").get_by_text("workspace").wait_for()
        assert await page.get_by_label("Workspace").get_attribute("aria-invalid") == "true"
        await page.reload()
        assert await page.get_by_label("Task").input_value() == "Count **all** files"
        await page.get_by_label("Workspace").fill("git+https://example.org/shop.git#main")
        await page.get_by_label("Task").press("Control+Enter")
        await page.locator(".item.user strong", has_text="all").wait_for()
        cid = page.url.rpartition("/")[2]
        created = (await server.client.events(cid))[0].model_dump()
        assert created["limits"]["max_iterations"] == 7
        assert created["limits"]["max_budget_usd"] == 0.5
        assert created["labels"] == {"team": "web", "ticket": "4711"}
        assert created["tenancy"]["tenant"] == "acme"
        assert not created["headless"]
        await page.get_by_text("More", exact=True).click()
        await page.get_by_role("link", name="Repeat…").click()
        await page.get_by_role("heading", name="Repeat a conversation").wait_for()
        assert await page.get_by_label("Task").input_value() == "Count **all** files"
        assert await page.get_by_label("Steps").input_value() == "7"
        await page.get_by_label("Workspace").fill("")
        await page.get_by_role("button", name="Start").click()
        await page.wait_for_url(f"{server.url}/#/c/*")
        await page.locator(".item.user").wait_for()
        assert page.url.rpartition("/")[2] != cid


async def test_form_adds_a_schedule_for_operators_of_all_tenants(server: Served) -> None:
    async with opened(f"{server.url}/#/new", key=await server.token("*")) as page:
        await page.get_by_label("Task").fill("Update the dependencies")
        await page.get_by_label("Start it again and again").check()
        await page.get_by_label("Name of the schedule").fill("nightly")
        await page.get_by_label("Times (cron)").fill("0 6 * * 1-5")
        await page.get_by_label("Reason").fill("the platform team asked")
        await page.get_by_role("button", name="Add the schedule").click()
        await page.get_by_role("heading", name="Conversations").wait_for()
    async with server.as_(await server.token("*")) as client:
        assert [one["cron"] for one in (await client.get("/schedules")).json()] == ["0 6 * * 1-5"]


async def test_an_unknown_id_says_so_and_hides_other_tenants(server: Served) -> None:
    theirs = await server.client.submit("Secret", title="Theirs")
    async with opened(f"{server.url}/#/c/no-such-conversation", key=await server.token("acme")) as page:
        await page.get_by_role("heading", name="There is no conversation no-such-conversation").wait_for()
        await page.goto(f"{server.url}/#/c/{theirs}")
        await page.get_by_role("heading", name=f"There is no conversation {theirs}").wait_for()
        assert "Theirs" not in await page.locator("main").inner_text()
        await page.goto(f"{server.url}/#/c/%E0%A4%A")
        await page.get_by_role("heading", name="Conversations").wait_for()


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_nothing_is_clipped_on_a_phone(server: Served, is_dark: bool) -> None:
    cid = await server.client.submit("x " * 400, title="A very long title of a conversation " * 4)
    last = await server.client.log.load_last_id(cid)
    diff = FileEditObservation(content="", path="a/" * 60, prev_exist=True, diff=DIFF, cause=last + 3)
    events = [state("running"), says("w" * 500), command("x" * 400), diff, reply(), command("ls"), output(last + 6)]
    await append(server, cid, events)

    async def check(page: Page, name: str) -> None:
        assert await page.evaluate(TOO_WIDE) == [], name

    async with opened(
        f"{server.url}/#/c/{cid}", width=NARROW, height=844, dark=is_dark, key=await server.token("*")
    ) as page:
        await page.locator(".item").first.wait_for()
        for tab, part in (
            ("Timeline", ".lane"),
            ("Usage", ".u-legend"),
            ("Files", ".files"),
            ("About", ".outline"),
            ("Log", ".item"),
        ):
            await page.get_by_role("tab", name=tab).click()
            await page.locator(part).first.wait_for()
            await check(page, tab)
            edge = await page.get_by_role("tab", name=tab).bounding_box()
            assert edge is not None
            assert edge["x"] + edge["width"] <= NARROW, tab
        for path, part in (
            ("#/new", ".begin"),
            ("#/", "tbody tr"),
            ("#/search/title", ".found li"),
            ("#/cluster", ".tiles"),
            ("#/evaluations", "main h1"),
        ):
            await page.goto(f"{server.url}/{path}")
            await page.locator(part).first.wait_for()
            await check(page, path)


async def test_timeline_and_usage_show_model_calls_and_tools(server: Served) -> None:
    cid = await server.client.submit("Run", title="Where the time went")
    last = await server.client.log.load_last_id(cid)
    slow = reply().model_copy(update={"latency_seconds": 2.5})
    events = [state("running"), slow, command("make test"), output(last + 3), reply(prompt=2_000), state("paused")]
    await append(server, cid, events)
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        await page.keyboard.press("2")
        await page.get_by_role("img", name="model call, 2.5 s").wait_for()
        await page.get_by_role("img", name="$ make test").wait_for()
        await page.get_by_role("button", name="$ make test").click()
        await page.locator(".item.step.current").wait_for()
        await page.keyboard.press("3")
        row = page.get_by_role("row", name="acme/large")
        assert json.loads(await row.evaluate("row => JSON.stringify([...row.cells].map((one) => one.textContent))")) == [
            "acme/large", "2", "3,000", "0 %", "100", "2.5 s", "$0.5000",
        ]  # fmt: skip
        await page.locator(".uplot canvas").first.wait_for()


async def test_timeline_shows_takeovers_and_cards_the_state_then(server: Served) -> None:
    store = server.client.store
    cid = await server.client.submit("Run", title="Taken over")
    last = await server.client.log.load_last_id(cid)
    await append(server, cid, [state("running"), says("First"), command("make"), output(last + 3), says("Second")])
    at = int((await server.client.events(cid))[-1].timestamp.timestamp() * 1_000) + 1
    fields = ("c", cid, "from", "controller-0<b>", "to", "controller-1", "at", str(at))
    await store.connection.call("XADD", (await store.locate(cid)).shard.takeovers, "*", *fields)
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        first = page.locator(".item.step").first
        await first.get_by_text("State then").click()
        facts = first.locator(".state-at")
        await facts.get_by_text("$0.2500").wait_for()
        assert await facts.locator("dt", has_text="Steps").evaluate("one => one.nextElementSibling.textContent") == "1"
        second = page.locator(".item.step").last
        await second.get_by_text("Prompt", exact=True).click()
        prompt = second.locator(".prompt-at")
        await prompt.get_by_text("Run", exact=True).wait_for()
        assert set(await prompt.locator("li > strong").all_inner_texts()) == {"user", "assistant"}
        await page.get_by_role("tab", name="Timeline").click()
        await page.get_by_role("img", name="from controller-0<b>, which had died: now controller-1").wait_for()
        await page.get_by_text("Takeovers 1", exact=True).wait_for()


async def test_button_to_the_end_covers_no_button_of_a_card(server: Served) -> None:
    cid = await server.client.submit("Run", title="Covered")
    await append(server, cid, [state("running"), *(says(f"Thought {number}") for number in range(100))])
    for width in (1280, NARROW):
        async with opened(f"{server.url}/#/c/{cid}", width=width, key=await server.token("*")) as page:
            await page.get_by_text("Thought 99", exact=True).wait_for()
            await page.keyboard.press("g")
            end = page.get_by_role("button", name="To the end")
            await end.wait_for()
            covering = await end.bounding_box()
            list_box = await page.locator(".timeline").bounding_box()
            assert covering is not None
            assert list_box is not None
            for part in await page.locator(".item footer :is(button, summary)").all():
                box = await part.bounding_box()
                assert box is not None
                apart = box["x"] >= covering["x"] + covering["width"] or box["x"] + box["width"] <= covering["x"]
                apart |= covering["y"] >= list_box["y"] + list_box["height"]
                assert apart, width
