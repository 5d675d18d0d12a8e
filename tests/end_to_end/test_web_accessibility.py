"""The pages as axe-core sees them, in dark and in light, and what a keyboard alone can do."""

from __future__ import annotations

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from deckhands.client.client import Client
from tests.browser_pages import CHROMIUM, opened
from tests.evaluation_parts import write_evaluation
from tests.polling import unhurried
from tests.screenshots import attempts, fill, fill_cluster
from tests.server_parts import Served

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")

PACKAGES = Path(__file__).parent / "axe"
SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
"""Of the minified script of axe-core 4.10.3."""
LIMIT_SECONDS = 120.0
CHECK = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.map((one) => [one.id, one.help, one.nodes.slice(0, 5).map((node) => node.html.slice(0, 200))]);
}"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, in the version of `package.json` and with its checksum."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = Path(shutil.copytree(PACKAGES, tmp_path_factory.mktemp("axe") / "packages"))
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, timeout=unhurried(LIMIT_SECONDS)
    )
    if done.returncode != 0:
        pytest.skip(f"npm cannot install axe-core: {done.stderr[-300:]}")
    script = (folder / "node_modules" / "axe-core" / "axe.min.js").read_bytes()
    assert sha256(script).hexdigest() == SHA256
    return script.decode()


async def _check(page: Page, axe: str) -> list[Any]:
    await page.locator("tbody tr, .why li, .say").first.wait_for()
    await page.evaluate(axe)
    violations: list[Any] = await page.evaluate(CHECK)
    return violations


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_nothing_on_any_page(server: Served, axe: str, is_dark: bool) -> None:
    store = server.client.store
    shown = await fill(store)
    fork = await Client(store).fork(shown, at=8)
    await fill_cluster(store)
    await write_evaluation(store, "nightly-shop", attempts(20), total=60)
    pages = {
        "conversations": "",
        "conversation": f"#/c/{shown}",
        "compare": f"#/compare/{shown}/{fork}",
        "evaluations": "#/evaluations",
        "evaluation": "#/e/nightly-shop",
        "cluster": "#/cluster",
    }
    found: dict[str, list[Any]] = {}
    async with opened(f"{server.url}/", dark=is_dark, key=await server.token("*")) as page:
        for name, path in pages.items():
            await page.goto(f"{server.url}/{path}")
            await page.reload()
            found[name] = await _check(page, axe)
        await page.goto(f"{server.url}/#/c/{shown}")
        await page.get_by_role("button", name="Edit…").click()
        await page.get_by_role("dialog").wait_for()
        found["dialog"] = await page.evaluate(CHECK)
    assert {name: each for name, each in found.items() if each} == {}


async def test_a_keyboard_reaches_events_answers_and_menus(server: Served) -> None:
    shown = await fill(server.client.store)
    async with opened(f"{server.url}/#/c/{shown}", key=await server.token("*")) as page:
        await page.locator("#confirm").wait_for()
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        assert await page.evaluate("document.activeElement.id") == "e2"
        await page.keyboard.press("k")
        assert await page.evaluate("document.activeElement.id") == "e1"
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
