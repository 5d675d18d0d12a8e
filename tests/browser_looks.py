"""A program that looks at a page several times and prints how many sessions with the browser are left after each.

It is a separate program because a browser that ends takes all processes below its own along.
"""

from __future__ import annotations

import asyncio
import gc
import sys

from playwright.async_api import CDPSession

from tests.browser_parts import opened_site
from tool_worker.host.browser.chromium import Chromium
from tool_worker.host.browser.page_view import view_page

LOOKS = 3


async def _main() -> None:
    async with opened_site() as site:
        site.page("/inner", "<button>Far</button>")
        url = site.page("/frames", f'<iframe src="{site.url("/inner", "localhost")}"></iframe>')
        chromium = await Chromium.start(sys.argv[1])
        page = chromium.context.pages[0]
        await page.goto(url)
        for _ in range(LOOKS):
            seen = await view_page(page)
            gc.collect()
            left = sum(isinstance(one, CDPSession) for one in gc.get_objects())
            sys.stdout.write(f"{'Far' in seen.tree} {left}\n")
        await chromium.end()


if __name__ == "__main__":
    asyncio.run(_main())
