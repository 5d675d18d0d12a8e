"""A view of a page: its tree with an id at every element, a screenshot, and the positions of elements in it.

Holds: viewing takes a bounded time, even if the page does not respond; frames that do not respond are left out.
Does not: keep anything between two views; element ids live in the page, see `marking.js`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from playwright.async_api import BrowserContext, CDPSession, Error, Frame, Page

from tool_worker.host.browser.page_tree import FrameTree, render_tree
from tool_worker.host.browser.set_of_marks import ElementMark

VIEW_LIMIT_SECONDS = 8.0
FRAME_LIMIT_SECONDS = 3.0
DETACH_LIMIT_SECONDS = 3.0
MAX_FRAMES = 50
MAX_MARKS = 500
MAX_TEXT_CHARS = 500_000
MAX_TREE_ELEMENTS = 10_000
"""Larger pages get no tree: Chromium would exceed the time limit, and the tree would be cut anyway."""

WORDS_ONLY = "[The page is too large to be shown as a tree: these are its words.]\n"


class PageSilent(Exception):
    """The page does not respond: its scripts keep it busy."""


@dataclass(slots=True)
class PageView:
    """One view of a page.

    Attributes:
        frames: The frames by the prefix of their elements' bids; the page itself has the empty prefix.
        png: A screenshot of the visible part; empty if there is none.
    """

    url: str = ""
    tree: str = ""
    text: str = ""
    focused_bid: str = ""
    png: bytes = b""
    marks: list[ElementMark] = field(default_factory=list)
    frames: dict[str, Frame] = field(default_factory=dict)


class _ViewBuilder:
    """Builds one view of a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.view = PageView(url=page.url)
        self.clickable: set[str] = set()
        self.elements = 0

    async def mark(self, frame: Frame, prefix: str, left: float, top: float) -> None:
        """Assign bids to the elements of a frame and of the frames inside it."""
        limit = VIEW_LIMIT_SECONDS if frame is self.page.main_frame else FRAME_LIMIT_SECONDS
        async with asyncio.timeout(limit):
            found = await frame.evaluate(_load_marking_script(), prefix)
        self.view.frames[prefix] = frame
        self.elements += int(found["count"])
        for bid, *box, is_clickable, is_marked in found["visible"]:
            if is_clickable:
                self.clickable.add(bid)
            if is_marked and len(self.view.marks) < MAX_MARKS:
                x1, y1, x2, y2 = box
                self.view.marks.append(ElementMark(bid, int(left + x1), int(top + y1), int(left + x2), int(top + y2)))
        self.view.focused_bid = str(found["focused"] or "") or self.view.focused_bid
        windows = {bid: place for bid, *place in found["windows"]}
        for child in frame.child_frames:
            if len(self.view.frames) < MAX_FRAMES:
                with suppress(TimeoutError, Error):  # the frame is gone or does not respond
                    await self._mark_child(child, windows, left, top)

    async def _mark_child(self, child: Frame, windows: Mapping[str, list[float]], left: float, top: float) -> None:
        async with asyncio.timeout(FRAME_LIMIT_SECONDS):
            bid = await (await child.frame_element()).get_attribute("bid")
        if bid:
            x, y = windows.get(bid, [0.0, 0.0])
            await self.mark(child, bid, left + x, top + y)

    async def tree(self, session: CDPSession) -> FrameTree:
        """Return the tree of everything visible to one CDP session."""
        snapshot = await session.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
        return await self._document(session, snapshot, 0)

    async def _document(self, session: CDPSession, snapshot: Mapping[str, Any], number: int) -> FrameTree:
        document = snapshot["documents"][number]
        strings = snapshot["strings"]
        nodes = document["nodes"]
        numbers = nodes["backendNodeId"]
        bids = {}
        for backend, attributes in zip(numbers, nodes["attributes"], strict=True):
            for name, value in zip(attributes[::2], attributes[1::2], strict=True):
                if strings[name] == "bid":
                    bids[backend] = strings[value]
        for index in nodes["isClickable"]["index"]:
            self.clickable.add(bids.get(numbers[index], ""))
        inner = dict(zip(nodes["contentDocumentIndex"]["index"], nodes["contentDocumentIndex"]["value"], strict=True))
        frames = {}
        for index, backend in enumerate(numbers):
            if bids.get(backend) in self.view.frames:
                with suppress(TimeoutError, Error):
                    frames[backend] = await (
                        self._document(session, snapshot, inner[index])
                        if index in inner
                        else self._remote_frame_tree(self.view.frames[bids[backend]])
                    )
        reported = await session.send("Accessibility.getFullAXTree", {"frameId": strings[document["frameId"]]})
        return FrameTree(reported["nodes"], bids, frames)

    async def _remote_frame_tree(self, frame: Frame) -> FrameTree:
        """Return the tree of a frame that another browser process renders."""
        async with asyncio.timeout(FRAME_LIMIT_SECONDS), open_cdp_session(self.page.context, frame) as session:
            return await self.tree(session)


@asynccontextmanager
async def open_cdp_session(context: BrowserContext, target: Page | Frame) -> AsyncIterator[CDPSession]:
    """Yield a CDP session and detach it afterwards; the browser would keep it until the tab closes."""
    session = await context.new_cdp_session(target)
    try:
        yield session
    finally:
        with suppress(TimeoutError, Error):
            async with asyncio.timeout(DETACH_LIMIT_SECONDS):
                await session.detach()


async def view_page(page: Page) -> PageView:
    """Return a view of a page.

    Raises:
        PageSilent: the page does not respond.
        playwright.async_api.Error: the page was closed or left meanwhile.
    """
    looking = _ViewBuilder(page)
    try:
        async with asyncio.timeout(VIEW_LIMIT_SECONDS):
            await looking.mark(page.main_frame, "", 0.0, 0.0)
            async with open_cdp_session(page.context, page) as session:
                if looking.elements > MAX_TREE_ELEMENTS:
                    looking.view.tree = WORDS_ONLY + await read_text(page)
                else:
                    looking.view.tree = render_tree(await looking.tree(session), frozenset(looking.clickable))
                looking.view.png = await _take_screenshot(session)
    except TimeoutError as error:
        raise PageSilent("The page does not answer.") from error
    looking.view.url = page.url
    return looking.view


async def read_text(page: Page) -> str:
    """Return the text of a page.

    Raises:
        PageSilent: the page does not respond.
    """
    try:
        async with asyncio.timeout(VIEW_LIMIT_SECONDS):
            text = await page.evaluate("() => document.body ? document.body.innerText : ''")
    except TimeoutError as error:
        raise PageSilent("The page does not answer.") from error
    return str(text)[:MAX_TEXT_CHARS]


async def _take_screenshot(session: CDPSession) -> bytes:
    try:
        shot = await session.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True})
    except Error:
        return b""
    return base64.b64decode(shot["data"])


@cache
def _load_marking_script() -> str:
    return Path(__file__).with_name("marking.js").read_text(encoding="utf-8")
