"""The web page in a real Chromium, driven by Playwright, over a real server and controller workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.policies import ConfirmationPolicy

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
LIMIT_MS = 120_000


TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [document.body, ...document.querySelectorAll("body *")].filter((one) => one.scrollWidth > width || one.getBoundingClientRect().right > width)
    .map((one) => `${one.tagName} ${one.className} ${one.textContent.slice(0, 60)}`);
}"""
"""What makes a page wider than its screen; a part that scrolls by itself does not."""


@asynccontextmanager
async def opened(
    address: str,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    key: str = "",
    login: tuple[str, str] | None = None,
) -> AsyncIterator[Page]:
    """A tab at an address; at the end it has met no error and nothing that its policy forbids.

    Args:
        key: of our own server; the page has it already, as after a login.
        login: name and password, for a site that asks for them.
    """
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
                http_credentials=None if login is None else {"username": login[0], "password": login[1]},
            )
            page.set_default_timeout(LIMIT_MS)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on(
                "console",
                lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None,
            )
            if key:
                await page.add_init_script(f"sessionStorage.setItem('deckhands.key', {json.dumps(key)})")
            await page.goto(address)
            try:
                yield page
            finally:
                assert errors == [], errors
        finally:
            await browser.close()


def scripted(folder: Path, turns: Sequence[dict[str, Any]], *, confirm: bool = False) -> AgentSpec:
    script = folder / f"script-{len(list(folder.glob('script-*')))}.json"
    script.write_text(json.dumps({"turns": list(turns)}))
    policy = ConfirmationPolicy(mode="always") if confirm else ConfirmationPolicy()
    return AgentSpec(llm=LLMSpec(model=f"scripted/{script}"), confirmation=policy)
