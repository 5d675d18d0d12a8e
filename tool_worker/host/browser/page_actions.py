"""Performs actions in the tabs of a browser; one method for each action of `action_strings.ACTIONS`.

Holds: a failed action raises `ActionFailed` with a text for the model, within its time limit. Only actions that a user
could perform are possible: a hidden or covered element cannot be clicked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Error, Frame, Locator

from tool_worker.host.browser.action_strings import BrowserCall
from tool_worker.host.browser.chromium import has_network
from tool_worker.host.browser.tabs import BLANK, Tabs

ELEMENT_LIMIT_SECONDS = 5.0
NAVIGATION_LIMIT_SECONDS = 30.0
DOWNLOAD_START_SECONDS = 3.0
MAX_ERROR_CHARS = 1_500
SCHEMES = ("http", "https", "file", "data")
NO_NETWORK = (
    "The workspace has no access to the network: only its own servers on localhost and its own files (file://) can be "
    "opened."
)
REFUSED = "The proxy through which the workspace reaches the network does not let it reach this host."
UNREACHABLE = (
    "ERR_NAME_NOT_RESOLVED",
    "ERR_INTERNET_DISCONNECTED",
    "ERR_ADDRESS_UNREACHABLE",
    "ERR_NETWORK_ACCESS_DENIED",
    "ERR_NAME_RESOLUTION_FAILED",
    "ERR_NETWORK_CHANGED",
    "ERR_CONNECTION_TIMED_OUT",
    "ERR_NETWORK_IO_SUSPENDED",
)
REASON_PHRASES = ("element is ", "intercepts pointer events", "did not find some options", "outside of the viewport")
"""Log lines with one of these texts give the reason why an action on an element failed."""

_BID = re.compile(r"[A-Za-z]*\d{0,9}")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class ActionFailed(Exception):
    """The action failed; the text is for the model."""


class PageActions:
    """Performs actions in tabs.

    Args:
        frames: The frames of the active tab at the latest view, see `PageView`.
        folder: The base of relative file paths.

    Attributes:
        is_download: Whether an opened address turned out to be a download.
    """

    def __init__(self, tabs: Tabs, frames: Mapping[str, Frame], folder: Path) -> None:
        self._tabs = tabs
        self._frames = frames
        self._folder = folder
        self.is_download = False

    async def perform(self, call: BrowserCall) -> None:
        """Perform one action.

        Raises:
            ActionFailed: the action failed.
        """
        try:
            await getattr(self, call.name)(**call.arguments)
        except Error as error:
            raise ActionFailed(_explain_error(str(error))) from error

    async def noop(self, wait_ms: float) -> None:
        """Wait."""
        await asyncio.sleep(max(wait_ms, 0) / 1000)

    async def goto(self, url: str) -> None:
        """Open an address, or download its file."""
        url = url.strip()
        scheme = urlsplit(url).scheme.lower() if url != BLANK else "http"
        if scheme not in SCHEMES:
            raise ActionFailed(f"{url[:200]!r} cannot be opened: an address begins with http://, https:// or file://.")
        try:
            limit = NAVIGATION_LIMIT_SECONDS * 1000
            await self._tabs.active.goto(url, wait_until="domcontentloaded", timeout=limit)
        except Error as error:
            self.is_download = await self._is_download(str(error))
            if not self.is_download:
                raise

    async def go_back(self) -> None:
        """Go back in the tab's history."""
        await self._tabs.active.go_back(wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_SECONDS * 1000)

    async def go_forward(self) -> None:
        """Go forward in the tab's history."""
        await self._tabs.active.go_forward(wait_until="domcontentloaded", timeout=NAVIGATION_LIMIT_SECONDS * 1000)

    async def scroll(self, delta_x: float, delta_y: float) -> None:
        """Turn the mouse wheel."""
        await self._tabs.active.mouse.wheel(delta_x, delta_y)

    async def fill(self, bid: str, value: str) -> None:
        """Replace the text of a field."""
        await (await self._element(bid)).fill(value, timeout=_LIMIT)

    async def select_option(self, bid: str, options: list[str]) -> None:
        """Select options of a list, by value or by label."""
        await (await self._element(bid)).select_option(options, timeout=_LIMIT, no_wait_after=True)

    async def click(self, bid: str, button: Any, modifiers: Sequence[Any]) -> None:
        """Click an element."""
        element = await self._element(bid)
        # Do not wait for a page that the click opens; `Tabs.wait_until_loaded` does.
        await element.click(button=button, modifiers=list(modifiers), timeout=_LIMIT, no_wait_after=True)

    async def dblclick(self, bid: str, button: Any, modifiers: Sequence[Any]) -> None:
        """Double-click an element."""
        await (await self._element(bid)).dblclick(button=button, modifiers=list(modifiers), timeout=_LIMIT)

    async def hover(self, bid: str) -> None:
        """Move the mouse over an element."""
        await (await self._element(bid)).hover(timeout=_LIMIT)

    async def press(self, bid: str, key_comb: str) -> None:
        """Press keys, such as `Enter` or `ControlOrMeta+a`."""
        await (await self._element(bid)).press(key_comb, timeout=_LIMIT, no_wait_after=True)

    async def focus(self, bid: str) -> None:
        """Focus an element."""
        await (await self._element(bid)).focus(timeout=_LIMIT)

    async def clear(self, bid: str) -> None:
        """Empty a field."""
        await (await self._element(bid)).clear(timeout=_LIMIT)

    async def drag_and_drop(self, from_bid: str, to_bid: str) -> None:
        """Drag one element onto another."""
        start = await self._element(from_bid)
        end = await self._element(to_bid)
        mouse = self._tabs.active.mouse
        await start.hover(timeout=_LIMIT)
        await mouse.down()
        try:
            await end.hover(timeout=_LIMIT)
        finally:
            await mouse.up()

    async def upload_file(self, bid: str, file: list[str]) -> None:
        """Attach files of the workspace to a file field, or to an element whose click opens a file chooser."""
        paths = [self._folder / name for name in file]
        for name, path in zip(file, paths, strict=True):
            if not path.is_file():
                raise ActionFailed(f"There is no file {name!r} in the workspace.")
        element = await self._element(bid)
        if await element.evaluate("element => element.tagName === 'INPUT' && element.type === 'file'", timeout=_LIMIT):
            await element.set_input_files(paths, timeout=_LIMIT)
            return
        async with self._tabs.active.expect_file_chooser(timeout=_LIMIT) as asked:
            await element.click(timeout=_LIMIT)
        await (await asked.value).set_files(paths, timeout=_LIMIT)

    async def new_tab(self) -> None:
        """Open a new tab."""
        await self._tabs.open()

    async def tab_close(self) -> None:
        """Close the active tab."""
        await self._tabs.close(self._tabs.active)

    async def tab_focus(self, index: float) -> None:
        """Activate another tab."""
        count = len(self._tabs.urls)
        if index not in range(count):
            raise ActionFailed(f"There is no tab {index:g}: they are numbered from 0 to {count - 1}.")
        await self._tabs.choose(int(index))

    async def console(self) -> None:
        """Show all messages of the console."""
        self._tabs.log.request_all()

    async def answer_dialogs(self, accept: bool, text: str) -> None:
        """Set how dialogs are answered from now on."""
        self._tabs.accepts_dialogs = accept
        self._tabs.dialog_text = text

    async def send_msg_to_user(self, text: str) -> None:
        """Do nothing: the message is part of the action, see `BrowseInteractiveAction`."""

    async def report_infeasible(self, reason: str) -> None:
        """Do nothing; see `send_msg_to_user`."""

    async def _element(self, bid: str) -> Locator:
        prefix = bid.rstrip("0123456789")
        if bid == prefix:  # a frame element: its bid is the prefix and one more letter
            prefix = re.sub(r"[A-Z]*[a-z]$", "", bid)
        frame = self._frames.get(prefix) if bid and _BID.fullmatch(bid) else None
        if frame is not None:
            found = frame.locator(f'[bid="{bid}"]')
            if await found.count():
                return found.first
        raise ActionFailed(
            f"There is no element with the bid {bid[:50]!r} on the page. Use a bid of the latest accessibility tree."
        )

    async def _is_download(self, error: str) -> bool:
        """Return whether an address failed to open because it is a download."""
        if "Download is starting" not in error and "ERR_ABORTED" not in error:
            return False
        return await self._tabs.wait_for_download(DOWNLOAD_START_SECONDS)


_LIMIT = ELEMENT_LIMIT_SECONDS * 1000


def _explain_error(error: str) -> str:
    """Return a browser error for the model: its first line, and the lines of its log that give reasons."""
    head, _, log = _ESCAPES.sub("", error).partition("\n")
    head = re.sub(r"^(Page|Locator|Mouse|Keyboard|Frame)\.\w+: (Error: )?", "", head)
    lines = [line.strip(" -") for line in log.splitlines()]
    reasons = dict.fromkeys(line for line in lines if any(word in line for word in REASON_PHRASES))
    if any(code in head for code in UNREACHABLE) and not has_network():
        reasons = {NO_NETWORK: None}
    if "ERR_TUNNEL_CONNECTION_FAILED" in head:
        reasons = {REFUSED: None}
    return "\n".join([head, *reasons])[:MAX_ERROR_CHARS]
