"""The views of evaluations, of the cluster and of the list in a real Chromium, with content of strangers.

And the pages as axe-core sees them, in dark and in light, and their use by keyboard alone."""

from __future__ import annotations

import asyncio
import base64
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from broker.contract.actions import AgentDelegateAction
from broker.contract.agent_state import AgentState
from broker.contract.error_texts import ERROR_KEYS
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from broker.contract.specs import Tenancy
from broker.log.append_call import Appended
from broker.runtime.ids import make_delegate_id
from broker.tools.mcp_config import read_servers
from deckhands.client.client import Client
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.server.auth.api_keys import Scope
from tests.archive_parts import begin_ended, retired
from tests.broker_parts import claim, enter
from tests.browser_pages import CHROMIUM, TOO_WIDE, opened
from tests.evaluation_parts import write_evaluation
from tests.npm_packages import install_packages
from tests.oauth_mcp_server import oauth_server
from tests.polling import until
from tests.screenshots import attempts, fill, fill_cluster, fill_operations, work
from tests.server_parts import Served, served
from tests.unit.deckhands.sample_log import reply, state, user

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken=1'>\x1b[31m\u202eabc"


def hostile(number: int, conversation_id: str) -> AttemptRow:
    return AttemptRow(
        instance=f"{HOSTILE}{number}",
        model=HOSTILE,
        attempt=1,
        outcome="limit",
        cause=HOSTILE,
        evidence=HOSTILE + "x" * 3_000,
        failures=[HOSTILE],
        tries=2,
        waiting_seconds={HOSTILE: 1.0},
        left_out=[HOSTILE],
        conversation_id=conversation_id,
        seconds=10.0 * number,
        cost_usd=0.1,
        critic_id=conversation_id,
        critic_cost_usd=0.25,
        lost_cost_usd=0.125,
        score=7.0,
        verdict=HOSTILE,
    )


async def test_evaluation_leads_by_failure_class_to_an_attempts_conversation(server: Served) -> None:
    store = server.client.store
    cid = await server.client.submit("x", title="The attempt", tenancy=Tenancy(tenant="acme"))
    rows = [AttemptRow(instance=f"fine-{number:03}", model="m", attempt=1, outcome="resolved") for number in range(70)]
    await write_evaluation(store, "hostile-one", [*rows, hostile(1, cid), hostile(2, cid)], tenant="acme", total=100)
    await write_evaluation(store, "of-another", rows, tenant="other")
    token = await server.token()
    async with opened(f"{server.url}/#/evaluations", width=420, height=800, dark=True) as page:
        await page.get_by_label("Key").fill(token)
        await page.get_by_role("button", name="Enter").click()
        await page.get_by_role("link", name="Evaluations").click()
        await page.get_by_role("link", name="shipped").wait_for()
        assert await page.locator("tbody tr").count() == 1
        await page.get_by_role("link", name="shipped").click()
        await page.locator("#attempts tbody tr").first.wait_for()
        await page.get_by_role("button", name="Next").click()
        await page.locator("#attempts tbody tr", has_text="fine-060").wait_for()
        await page.get_by_role("button", name="Show attempts that ended as limit").click()
        await page.locator("#attempts tbody tr", has_text="fine-060").wait_for(state="detached")
        assert await page.locator("#attempts > .scroll > table > tbody > tr").count() == 2
        await page.locator("#attempts summary").first.click()
        text = await page.locator("main").inner_text()
        assert "\\x1b[31m" in text
        assert (
            text.count("critics $0.5000") == text.count("tries that failed $0.2500") == 1
        )  # of the model, then of each
        assert text.count("critics $0.2500") == text.count("tries that failed $0.1250") == 1
        assert "the critic gave 7: " in text
        assert "\\u202e" in text
        assert "\u202e" not in text
        assert await page.evaluate("window.broken") is None
        assert await page.locator("main script, main img").count() == 0
        assert await page.evaluate(TOO_WIDE) == []
        await page.get_by_role("link", name="Conversation of").first.click()
        await page.get_by_role("heading", name="The attempt").wait_for()
        await page.goto(f"{server.url}/#/e/of-another")
        await page.get_by_text("There is no such evaluation.").wait_for()


async def test_the_cluster_shows_its_pace_and_what_binds_it(server: Served) -> None:
    store = server.client.store
    await enter(store, "controller-1")
    await fill_cluster(store)
    await server.client.submit("<b>x</b>")
    ends = asyncio.Event()
    working = asyncio.create_task(work(store, ends))
    try:
        async with opened(f"{server.url}/#/cluster", key=await server.token("*")) as page:
            await page.get_by_role("cell", name="calls at once", exact=True).wait_for()
            await page.get_by_role("img", name="94 % of $25.00").wait_for()
            await page.locator(".tile .line").first.wait_for(state="attached")
            steps = page.locator(".tile", has_text="Steps per second").locator(".figure")

            async def has_pace() -> bool:
                text = await steps.inner_text()
                return text not in ("…", "0.00")

            await until(has_pace, limit=60.0, what="steps per second")
            await page.get_by_role("link", name="Conversations").click()
            await page.get_by_role("heading", name="Conversations").wait_for()
            await page.get_by_role("link", name="Cluster").click()
            await page.locator(".tile .line").first.wait_for(state="attached")  # the earlier entries are still there
    finally:
        ends.set()
        await working


async def test_delegates_are_shown_as_a_tree(server: Served) -> None:
    async def hands_on(conversation_id: str, agent: str) -> str:
        asked = AgentDelegateAction(agent=agent, inputs={"task": f"{HOSTILE} for {agent}"})
        appended = await server.client.log.append(conversation_id, [asked])
        assert isinstance(appended, Appended)
        below = make_delegate_id(conversation_id, appended.last_id)
        return await server.client.submit("Part of it", conversation_id=below)

    above = await server.client.submit("All of it")
    scout = await hands_on(above, "Scout")
    async with opened(f"{server.url}/#/c/{above}", key=await server.token("*")) as page:
        tree = page.locator("aside ul ul ul").first
        await page.get_by_role("link", name="Scout").wait_for()
        tester = await hands_on(scout, "Tester")
        digger = await hands_on(tester, "Digger")  # seen though the page's own conversation has no event of it
        await tree.get_by_role("link", name="Digger").wait_for(timeout=60_000)
        assert await tree.get_by_role("link", name="Digger").get_attribute("href") == f"#/c/{digger}"
        assert "\\x1b[31m" in await tree.inner_text()
        assert await page.evaluate("window.broken") is None
        await tree.get_by_role("link", name="Digger").click()
        await page.get_by_role("heading", name="Part of it").wait_for()


async def test_delegate_whose_end_is_read_first_has_ended(server: Served) -> None:
    begun = {"kind": "action.delegate", "id": 5, "agent": "Scout", "inputs": {"task": "look"}}
    ended = {
        "kind": "conversation.delegate_ended",
        "delegate_id": 5,
        "agent_state": "finished",
        "conversation_id": "d1",
    }
    async with opened(f"{server.url}/", key=await server.token("*")) as page:
        taken = """async (events) => {
          const aborting = new AbortController(), { tree } = await import("/web/delegates.js");
          const shown = tree("above", aborting.signal);
          events.forEach(shown.take);
          aborting.abort();
          return shown.node.textContent;
        }"""
        for order in ([begun, ended], [ended, begun]):
            assert (await page.evaluate(taken, order)).split() == ["Scout", "look", "finished"]


async def test_search_takes_a_long_word_as_id_or_title(server: Served) -> None:
    await enter(server.client.store, "controller-1")
    word = "a_title_without_any_space"
    made = {title: await server.client.submit("x", title=title) for title in ("Dear", word)}
    async with opened(f"{server.url}/", key=await server.token("*")) as page:
        search = page.get_by_role("searchbox", name="Search")
        for text, found in (
            (made["Dear"], "Dear"),
            (word[:22], word),
            ("no_such_title_nor_any_id", "No conversation matches."),
        ):
            await search.fill(text)
            await page.locator("tbody tr", has_text=found).wait_for()
            await page.locator("tbody tr").nth(1).wait_for(state="detached")
            assert await page.locator("tbody tr", has_text=found).count() == 1


async def test_words_are_found_in_the_texts_of_all_conversations(tmp_path: Path, programs: dict[str, str]) -> None:
    """Live and archived ones, with a link to the event; what they say stays text."""
    place = tmp_path / "archive"
    async with (
        served(tmp_path / "log", programs, archive=str(place)) as server,
        await Client.connect(server.log.admin) as admin,
    ):
        client = Client(admin.store, str(place))
        for name in ("old-1", "old-2"):
            await begin_ended(client, name, user(f"A needle of {name}, {HOSTILE}"))
        await retired(admin.store, place, tmp_path)
        await begin_ended(client, "new-1", user("Nothing"))
        await begin_ended(client, "new-2", user("Another NEEDLE, and more"))
        async with opened(f"{server.url}/", width=390, key=await server.token("*")) as page:
            await page.get_by_role("searchbox", name="Search").fill("needle")
            await page.get_by_role("button", name="In all texts").click()
            await page.get_by_text("That is all. 3 found, 4 searched").wait_for()
            found = page.locator(".found li")
            assert "Another NEEDLE, and more" in await found.nth(0).inner_text()
            assert sorted(await found.locator(".label", has_text="archived").all_inner_texts()) == 2 * ["archived"]
            assert {mark.lower() for mark in await found.locator("mark").all_inner_texts()} == {"needle"}
            assert await page.evaluate("window.broken") is None
            assert await page.evaluate(TOO_WIDE) == []
            await found.nth(0).get_by_role("link").click()
            await page.locator(".item", has_text="Another NEEDLE").wait_for()
            await page.locator("#main").press("s")
            await page.get_by_role("searchbox", name="Words").fill("nowhere")
            await page.keyboard.press("Enter")
            await page.get_by_text("That is all. 0 found, 4 searched").wait_for()


COMMAND_NOTES = (
    "\n[The command timed out after 5 seconds. You may wait longer to see more.]",
    '\n[Your command "ls" is NOT executed. The previous command is still running. You may wait longer to see it.]',
    "\n[The command was cancelled before it ran.]\n[Terminal: t]",
    "\n[The command completed with exit code 130.]\n[The command was cancelled.]",
    "\n[The command completed with exit code 0.]",
    "\n[The command runs in the background. It continues.]",
)


async def test_page_words_errors_and_commands_as_python_does(server: Served) -> None:
    async with opened(f"{server.url}/") as page:
        imported = "(await import('/web/errors.js'))"
        for key in (*ERROR_KEYS, "STATUS$SOMETHING_NEW", "RuntimeError: boom"):
            (paragraph,) = state("error", key).paragraphs
            assert await page.evaluate(f"async (reason) => {imported}.reasonOf({{ reason }})", key) == paragraph.text
        for suffix in COMMAND_NOTES:
            metadata = CmdOutputMetadata(exit_code=-1, suffix=suffix)
            expected = CmdOutputObservation(command="ls", metadata=metadata).explanation
            found = await page.evaluate(
                f"async (metadata) => {imported}.explanationOf({{ metadata }})", metadata.model_dump()
            )
            assert found == expected


async def test_timed_out_command_says_so_on_the_page(server: Served) -> None:
    cid = await server.client.submit("Wait")
    metadata = CmdOutputMetadata(suffix=COMMAND_NOTES[0])
    ended = state("error", "STATUS$ERROR_LLM_AUTHENTICATION")
    await server.client.log.append(cid, [CmdOutputObservation(command="sleep 9", metadata=metadata), ended])
    async with opened(f"{server.url}/#/c/{cid}", key=await server.token("*")) as page:
        card = page.locator(".item.bad", has_text="no output")
        await card.get_by_text("The command timed out after 5 seconds.", exact=True).wait_for()
        assert "exit code" not in await card.inner_text()
        await page.locator("p", has_text="The model's provider refused the API key. Check LLM_API_KEY.").wait_for()


async def test_a_tenant_sees_no_figures_of_the_whole_cluster(server: Served) -> None:
    await fill_cluster(server.client.store)
    token = await server.token("acme")
    async with opened(f"{server.url}/#/cluster", key=token) as page:
        await page.get_by_role("cell", name="tenant:acme").wait_for()
        await page.get_by_text("Figures of the whole cluster need a key").wait_for()
        assert "globex" not in await page.locator("main").inner_text()


async def test_list_is_filtered_and_failed_conversations_requeued(server: Served) -> None:
    store = server.client.store
    await enter(store, "controller-1")
    made = {}
    for title, tenant, model, cost, end in (
        ("Dear", "acme", "acme/large", 2.5, "error"),
        ("Cheap", "acme", "acme/large", 0.1, "error"),
        ("Other model", "acme", "acme/small", 3.0, "error"),
        ("Other tenant", "other", "acme/large", 4.0, "error"),
    ):
        cid = made[title] = await server.client.submit("x", title=title, tenancy=Tenancy(tenant=tenant))
        ownership = await claim(store, "controller-1", cid)
        fields: dict[str, str | int | float] = {"state": AgentState.ERROR.value, "cost_usd": cost, "model": model}
        fields["busy"] = ""
        last_id = await server.client.log.load_last_id(cid)
        events = [state("running"), reply(), state(end, "it failed")]
        await server.client.log.append_as_owner(ownership, events, expected_last_id=last_id, fields=fields)
    async with opened(f"{server.url}/", key=await server.token("*")) as page:
        await page.get_by_role("link", name="Dear").wait_for()
        for name, value, gone in (("Tenant", "acme", "Other tenant"), ("Model", "LARGE", "Other model")):
            await page.get_by_role("textbox", name=name).fill(value)
            await page.get_by_role("textbox", name=name).press("Tab")
            await page.get_by_role("link", name=gone).wait_for(state="detached")
        await page.get_by_label("Cost from $").fill("0.5")
        await page.get_by_label("Cost from $").press("Tab")
        await page.get_by_role("link", name="Cheap").wait_for(state="detached")
        assert await page.locator("tbody tr").count() == 1
        await page.get_by_label("Choose Dear").check()
        await page.get_by_role("button", name="Requeue").click()
        await page.get_by_label("Reason").fill("the provider is back")
        await page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
        await page.get_by_text("1 done.").wait_for()
        await page.get_by_role("button", name="Save filter").click()
        await page.get_by_label("Its name").fill("dear ones")
        await page.get_by_role("dialog").get_by_role("button", name="Save").click()
        await page.reload()
        await page.get_by_role("link", name="Other tenant").wait_for()
        await page.get_by_label("Saved filters").select_option("dear ones")
        await page.get_by_role("link", name="Other tenant").wait_for(state="detached")
        assert await page.get_by_label("Cost from $").input_value() == "0.5"
        await page.get_by_role("searchbox", name="Search").fill("no such title")
        await page.get_by_text("No conversation matches.").wait_for()
    found = [event for event in await server.client.events(made["Dear"]) if event.kind == "conversation.operator_acted"]
    assert [event.model_dump()["action"] for event in found] == ["requeue"]
    async with server.as_(await server.token("acme")) as client:
        named = (await client.get("/conversations?title=MODEL")).json()["conversations"]
        assert [one["title"] for one in named] == ["Other model"]
        assert (await client.get("/conversations?title=tenant")).json()["conversations"] == []
        assert (await client.get(f"/conversations?title={'x' * 301}")).status_code == 422
    async with server.as_(await server.token("other")) as client:
        everything = (await client.get("/conversations?min_cost_usd=0.5")).json()["conversations"]
        assert [one["title"] for one in everything] == ["Other tenant"]
        for query in ("min_cost_usd=-1", "min_cost_usd=nan", f"model={'x' * 301}"):
            assert (await client.get(f"/conversations?{query}")).status_code == 422, query


PACKAGES = Path(__file__).parent / "axe"
SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
"""Of the minified script of axe-core 4.10.3."""
CHECK = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.map((one) => [one.id, one.help, one.nodes.slice(0, 5).map((node) => node.html.slice(0, 200))]);
}"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, in the version of `package.json` and with its checksum."""
    folder = install_packages(PACKAGES, tmp_path_factory.mktemp("axe") / "packages")
    script = (folder / "node_modules" / "axe-core" / "axe.min.js").read_bytes()
    assert sha256(script).hexdigest() == SHA256
    return script.decode()


async def _check(page: Page, axe: str) -> list[Any]:
    await page.locator("tbody tr, .why li, .say, .begin, .found li").first.wait_for()
    await page.evaluate(axe)
    violations: list[Any] = await page.evaluate(CHECK)
    return violations


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_nothing_on_any_page(server: Served, axe: str, is_dark: bool) -> None:
    store = server.client.store
    shown = await fill(store)
    fork = await Client(store).fork(shown, at=8)
    await fill_cluster(store)
    await fill_operations(store)
    await write_evaluation(store, "nightly-shop", attempts(20), total=60)
    pages = {
        "conversations": "",
        "conversation": f"#/c/{shown}",
        "compare": f"#/compare/{shown}/{fork}",
        "evaluations": "#/evaluations",
        "evaluation": "#/e/nightly-shop",
        "cluster": "#/cluster",
        "new": "#/new",
        "search": "#/search/cart",
    }
    found: dict[str, list[Any]] = {}
    async with opened(f"{server.url}/", dark=is_dark, key=await server.token("*")) as page:
        for name, path in pages.items():
            await page.goto(f"{server.url}/{path}")
            await page.reload()
            found[name] = await _check(page, axe)
        await page.goto(f"{server.url}/#/c/{shown}")
        for tab, part in (("Timeline", ".lane"), ("Usage", ".u-legend"), ("Files", ".files"), ("Log", ".item")):
            await page.get_by_role("tab", name=tab).click()
            await page.locator(part).first.wait_for()
            found[tab] = await page.evaluate(CHECK)
        await page.get_by_text("State then").last.click()
        await page.locator(".state-at").wait_for()
        found["state"] = await page.evaluate(CHECK)
        await page.get_by_role("button", name="Edit…").click()
        await page.get_by_role("dialog").wait_for()
        found["dialog"] = await page.evaluate(CHECK)
    assert {name: each for name, each in found.items() if each} == {}


async def test_why_panel_names_what_the_page_offers(server: Served) -> None:
    shown = await fill(server.client.store)
    async with opened(f"{server.url}/#/c/{shown}", key=await server.token("*")) as page:
        remedy = page.locator(".why .remedy", has_text="Confirm the action below the log")
        await remedy.wait_for()
        assert "deckhands" not in await remedy.inner_text()


async def test_a_keyboard_reaches_events_answers_and_menus(server: Served) -> None:
    shown = await fill(server.client.store)
    async with opened(f"{server.url}/#/c/{shown}", key=await server.token("*")) as page:
        await page.locator("#confirm").wait_for()
        await page.keyboard.press("g")
        await page.locator("#i1:focus").wait_for()
        await page.keyboard.press("j")
        await page.locator("#i2:focus").wait_for()
        await page.keyboard.press("k")
        await page.locator("#i1:focus").wait_for()
        await page.keyboard.press("e")
        await page.locator(".item.bad:focus").wait_for()
        await page.keyboard.press("?")
        await page.get_by_role("dialog", name="Keys").wait_for()
        await page.keyboard.press("Escape")
        await page.keyboard.press("3")
        await page.get_by_role("heading", name="Cost so far").wait_for()
        await page.keyboard.press("1")
        await page.get_by_role("textbox", name="Message").focus()
        await page.keyboard.type("jk")
        assert await page.get_by_role("textbox", name="Message").input_value() == "jk"
        await page.locator("#edit").focus()
        await page.keyboard.press("Enter")
        await page.get_by_role("dialog").wait_for()
        assert await page.evaluate("document.activeElement.id") == "asked-command"
        await page.keyboard.press("Escape")
        await page.get_by_role("dialog").wait_for(state="detached")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "reject"
        await page.goto(f"{server.url}/")
        await page.get_by_role("link", name="The total of the cart is wrong").wait_for()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"


async def test_cluster_page_shows_rollout_runs(server: Served) -> None:
    run = {"prompts": [{"id": "one", "task": "Add", "answer": "2"}], "model": "openai/stub", "tenant": "acme"}
    async with server.as_(await server.token("*")) as client:
        made = await client.post("/rollouts", json=run, headers={"Idempotency-Key": "one"})
        assert made.status_code < 300, made.text
    async with opened(f"{server.url}/#/cluster", key=await server.token("*")) as page:
        row = page.locator("tr", has_text=made.json()["name"])
        await row.get_by_text("openai/stub").wait_for()
        assert "acme" in await row.inner_text()
        async with server.as_(await server.token("*")) as client:
            for number in range(100):
                made = await client.post("/rollouts", json=run, headers={"Idempotency-Key": f"more-{number}"})
                assert made.status_code < 300, made.text
        await page.get_by_role("heading", name="Rollout runs: the 100 that changed last").wait_for()
    async with opened(f"{server.url}/#/cluster", key=await server.token("other", [Scope.READ])) as page:
        await page.get_by_role("heading", name="Budgets").wait_for()
        assert await page.get_by_role("heading", name="Rollout runs").count() == 0


async def test_operator_changes_what_the_page_of_the_cluster_shows(server: Served) -> None:
    store = server.client.store
    await fill_cluster(store)
    ends = asyncio.Event()
    working = asyncio.create_task(work(store, ends))
    async with server.as_(await server.token("*")) as client:
        new = {"cron": "0 6 * * 1-5", "request": {"task": "Update"}, "reason": "a test"}
        assert (await client.put("/schedules/nightly", json=new)).status_code == 201
    async with opened(f"{server.url}/#/cluster", key=await server.token("*")) as page:
        dialog = page.get_by_role("dialog")
        for text in ("many", "Infinity"):
            await page.get_by_role("button", name="Change tenant:acme").click()
            await dialog.get_by_label("Limit in $").fill(text)
            await dialog.get_by_label("Reason").fill("the contract of March")
            await dialog.get_by_role("button", name="Set").click()
            await page.get_by_text(f"“{text}” is not an amount.").wait_for()
        await page.get_by_role("button", name="Change tenant:acme").click()
        await dialog.get_by_label("Limit in $").fill("40")
        await dialog.get_by_label("Reason").fill("the contract of March")
        await dialog.get_by_role("button", name="Set").click()
        await page.locator("tr", has_text="tenant:acme").get_by_text("$40.00").wait_for()
        await page.get_by_role("button", name="Change anthropic/* own").click()
        await dialog.get_by_label("Requests a minute; the file says 1,000").fill("300")
        await dialog.get_by_label("Reason").fill("the provider is slow")
        await dialog.get_by_role("button", name="Set").click()
        await page.locator("tr", has_text="anthropic/*").get_by_text("300 requests a minute (file: 1,000)").wait_for()
        await page.get_by_role("button", name="Change anthropic/* own").click()
        await dialog.get_by_label("Requests a minute; the file says 1,000").fill("250")
        async with server.as_(await server.token("*")) as client:
            change = {"key": "own", "limits": {"requests": 200}, "reason": "set by another administrator meanwhile"}
            assert (await client.put("/quotas/anthropic%2F%2A", json=change)).status_code == 200
        await dialog.get_by_label("Reason").fill("the provider is slow")
        await dialog.get_by_role("button", name="Set").click()
        await page.locator("tr", has_text="anthropic/*").get_by_text("200 requests a minute (file: 1,000)").wait_for()
        await page.get_by_role("button", name="Pause nightly").click()
        await dialog.get_by_label("Reason").fill("a holiday")
        await dialog.get_by_role("button", name="Pause").click()
        await page.locator("tr", has_text="nightly").get_by_text("paused").wait_for()
        await page.get_by_role("button", name="Remove nightly").click()
        await dialog.get_by_label("Reason").fill("no longer needed")
        await dialog.get_by_role("button", name="Remove").click()
        await page.locator("tr", has_text="nightly").wait_for(state="detached")
        await page.get_by_role("button", name="New webhook…").click()
        await dialog.get_by_label("Address").fill("http://127.0.0.1/hook")
        await dialog.get_by_label("Reason").fill("a test")
        await dialog.get_by_role("button", name="Add").click()
        await page.locator(".notice.bad", has_text="DECKHANDS_WEBHOOK_PRIVATE").wait_for()
        await page.get_by_role("button", name="New key…").click()
        for label, text in (("Name", "shop"), ("Tenant", "acme"), ("Valid for days", "30"), ("Reason", "a customer")):
            await dialog.get_by_label(label).fill(text)
        await dialog.get_by_role("button", name="Make").click()
        token = await dialog.get_by_label("It is not shown again").input_value()
        await dialog.get_by_role("button", name="I have kept it").click()
        await page.get_by_role("button", name="Revoke shop").click()
        await dialog.get_by_label("Reason").fill("left")
        await dialog.get_by_role("button", name="Revoke").click()
        await page.locator("tr", has_text="shop").get_by_text("revoked").wait_for()
    async with server.as_(token) as shop:
        assert (await shop.get("/conversations")).json()["code"] == "key_revoked"
    async with server.as_(await server.token("*")) as client:
        done = [(one["action"], one["reason"]) for one in (await client.get("/operations")).json()]
    assert ("budget.set", "40.0 USD: the contract of March") in done
    ends.set()
    await working
    assert ("quota.set", "requests=300: the provider is slow") in done
    assert ("schedule.pause", "a holiday") in done
    assert ("schedule.remove", "no longer needed") in done


async def test_operator_logs_in_at_an_mcp_server_on_the_page(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", base64.b64encode(b"k" * 32).decode())
    async with oauth_server() as remote:
        known = tmp_path / "mcp.json"
        known.write_text(json.dumps({"mcpServers": {"tracker": {"url": remote.url, "oauth": {"issuer": remote.base}}}}))
        async with (
            served(tmp_path / "log", programs, mcp_servers=read_servers(known, {})) as server,
            opened(f"{server.url}/#/cluster", key=await server.token("*")) as page,
        ):
            row = page.locator("tr", has_text="tracker")
            await row.get_by_text("needs a login").wait_for()
            await row.get_by_role("button", name="Log in tracker").click()
            await page.get_by_label("Reason").fill("a new tracker")
            async with page.expect_popup() as popup:
                await page.get_by_role("dialog").get_by_role("button", name="Log in").click()
            await (await popup.value).get_by_text("You may close this page.").wait_for()
            await row.get_by_role("button", name="Forget tracker").wait_for()


async def test_reader_of_a_tenant_is_offered_no_changes(server: Served) -> None:
    await fill_cluster(server.client.store)
    async with opened(f"{server.url}/#/cluster", key=await server.token("acme", (Scope.READ,))) as page:
        await page.get_by_role("cell", name="tenant:acme").wait_for()
        assert await page.locator("main .cards button").count() == 0
        assert await page.get_by_role("button", name="Last day").count() == 0


async def test_dead_letter_is_requeued_from_the_cluster_page(server: Served) -> None:
    store = server.client.store
    await enter(store, "controller-1")
    cid = await server.client.submit("x", title=HOSTILE, tenancy=Tenancy(tenant="acme"))
    dead = (await store.locate(cid)).shard.dead
    await store.connection.call("ZADD", dead, 1, cid)
    async with opened(f"{server.url}/#/cluster", key=await server.token("acme")) as page:
        row = page.locator(".dead tr", has_text="<script>")
        await row.get_by_text("crashed three workers").wait_for()
        assert await page.evaluate("window.broken") is None
        await row.get_by_role("button", name="Requeue").click()
        await page.get_by_label("Reason").fill("the provider is back")
        await page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
        await page.locator(".dead").wait_for(state="detached")
    assert await store.connection.call("ZCARD", dead) == 0
    found = [event for event in await server.client.events(cid) if event.kind == "conversation.operator_acted"]
    assert [event.model_dump()["reason"] for event in found] == ["the provider is back"]


async def test_history_outlives_the_tab_and_has_a_day(server: Served) -> None:
    history = server.client.store.all_shards[0].history
    sample = json.dumps({"steps": 3.0, "takeovers": 1.0})
    for name, count, step in (("hour", 30, 5), ("day", 100, 60)):
        key = f"{history}:{name}"
        ids = [f"{(4_000_000_000 + number * step) * 1_000}-0" for number in range(count)]  # the server adds none before
        added = [("XADD", key, entry_id, "v", sample) for entry_id in ids]
        await server.client.store.connection.call_many([("DEL", key), *added])
    async with opened(f"{server.url}/#/cluster", key=await server.token("*")) as page:
        steps = page.get_by_role("img", name="Steps per second")
        await page.get_by_role("img", name="Takeovers: 30 in all").wait_for()
        assert await steps.locator(".line").first.evaluate("one => one.getAttribute('points').split(' ').length") == 30
        await page.get_by_role("button", name="Last day").click()
        await page.get_by_role("img", name="Takeovers: 100 in all").wait_for()
        assert await page.get_by_role("button", name="Last day").get_attribute("aria-pressed") == "true"
