"""The tabs of a browser, and the events that pages cause: dialogs, downloads, messages, new windows, crashes.

Holds: there is always an active tab; every dialog is answered at once; a successful download becomes a new file in the
workspace and overwrites none; the log of messages is bounded.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from playwright.async_api import BrowserContext, Dialog, Download, Error, Page, Request, Response

MAX_TABS = 20
MAX_NOTES = 50
MAX_SHOWN_CHARS = 500
MAX_URL_CHARS = 2_000
CLOSE_LIMIT_SECONDS = 2.0
LOAD_LIMIT_SECONDS = 3.0
SETTLE_SECONDS = 0.2
STOP_LIMIT_SECONDS = 0.5
MEASURE_SECONDS = 0.2
MAX_ARRIVING_BYTES = 256 << 20
"""Bound of all downloads in flight together."""
BLANK = "about:blank"
TOO_SLOW = "it did not end in time"
TOO_LARGE = f"it has more than {MAX_ARRIVING_BYTES >> 20} MiB"
BY_SHELL = "What takes longer, or is larger, is downloaded by a program in the shell's background, such as curl."

MAX_KEPT_MESSAGES = 100
MAX_NEWS = 10
MAX_MESSAGE_CHARS = 300
FAILED_STATUS = 400

_REPEATED = "Failed to load resource"
"""The start of Chromium's own message about a failed request, which `add_failure` reports with its address."""
_EXPECTED_FAILURES = ("net::ERR_ABORTED", "net::ERR_BLOCKED_BY_CLIENT")
"""Errors of requests that also occur when a page is left or a file is downloaded."""
_UNFIT = re.compile(r"[\x00-\x1f\x7f/\\]+")


class PageLog:
    """The developer messages of all tabs, in order: console messages, script errors, failed requests.

    Errors and failed requests are reported once; the last `MAX_KEPT_MESSAGES` messages of all kinds are kept.
    """

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=MAX_KEPT_MESSAGES)
        self._dropped = 0
        self._news: list[str] = []
        self._news_count = 0
        self._should_show_all = False

    def add_message(self, kind: str, text: str) -> None:
        """Add a console message."""
        if not text.startswith(_REPEATED):
            self._add(f"{kind}: {text[:MAX_MESSAGE_CHARS]}", is_news=kind == "error")

    def add_error(self, text: str) -> None:
        """Add an uncaught script error."""
        self._add(f"uncaught: {text[:MAX_MESSAGE_CHARS]}", is_news=True)

    def add_failure(self, method: str, url: str, why: str) -> None:
        """Add a request that failed or got an error status."""
        if why not in _EXPECTED_FAILURES:
            self._add(f"{method} {url[:MAX_MESSAGE_CHARS]} failed: {why[:MAX_MESSAGE_CHARS]}", is_news=True)

    def request_all(self) -> None:
        """Include all messages in the next result."""
        self._should_show_all = True

    def take_lines(self) -> list[str]:
        """Return lines for the model, with a head: the new messages, or all of them if requested."""
        if self._should_show_all:
            left_out = f"  ({self._dropped} older ones are gone)"
            lines = [*([left_out] if self._dropped else []), *(f"  {text}" for text in self._kept)] or ["  (nothing)"]
        else:
            lines = [f"  {text}" for text in self._news]
            if self._news_count > len(self._news):
                lines.append(f"  ({self._news_count - len(self._news)} more; console() shows them)")
        self._news = []
        self._news_count = 0
        self._should_show_all = False
        return ["[Console:]", *lines] if lines else []

    def _add(self, text: str, *, is_news: bool) -> None:
        text = " ".join(text.split())
        self._dropped += len(self._kept) == MAX_KEPT_MESSAGES
        self._kept.append(text)
        if is_news:
            self._news_count += 1
            if len(self._news) < MAX_NEWS:
                self._news.append(text)


class Tabs:
    """The tabs of one browser.

    Args:
        folder: The folder of finished downloads.
        arriving: The browser's folder of incomplete downloads.
    """

    def __init__(self, context: BrowserContext, folder: Path, arriving: Path) -> None:
        self.accepts_dialogs = False
        self.dialog_text = ""
        self.log = PageLog()
        self._context = context
        self._folder = folder
        self._arriving = arriving
        self._notes: list[str] = []
        self._downloads: set[asyncio.Task[None]] = set()
        self._in_flight: set[Download] = set()
        self._saved: list[Path] = []
        self._crashed: set[Page] = set()
        self._loading: dict[Page, Request] = {}
        self._load_finished = asyncio.Event()
        self._download_started = asyncio.Event()
        for page in context.pages:
            self._watch(page)
        self.active = context.pages[0]
        context.on("page", self._on_page_opened)

    @property
    def urls(self) -> list[str]:
        """The addresses of the tabs, in order."""
        return [shorten_url(page.url) for page in self._context.pages]

    @property
    def active_index(self) -> int:
        """The index of the active tab; -1 if it is closed."""
        pages = self._context.pages
        return pages.index(self.active) if self.active in pages else -1

    @property
    def is_crashed(self) -> bool:
        """Whether the active tab has crashed."""
        return self.active in self._crashed

    def note(self, text: str) -> None:
        """Add a note to the next result."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def take_news(self) -> tuple[list[str], list[Path]]:
        """Return and clear the notes and the downloaded files since the last call."""
        notes, self._notes = self._notes, []
        saved, self._saved = self._saved, []
        self._download_started.clear()
        return notes, saved

    async def open(self) -> None:
        """Open a tab and activate it."""
        self.active = await self._context.new_page()

    async def close(self, page: Page) -> None:
        """Close a tab and activate the previous one; a new tab replaces the last one."""
        pages = self._context.pages
        index = pages.index(page) if page in pages else 0
        if len(pages) <= 1:
            await self.open()
        with suppress(TimeoutError, Error):
            async with asyncio.timeout(CLOSE_LIMIT_SECONDS):
                await page.close()
        left = [other for other in self._context.pages if other is not page]
        if self.active is page:
            self.active = left[min(max(index - 1, 0), len(left) - 1)]

    async def choose(self, index: int) -> None:
        """Activate another tab.

        Raises:
            LookupError: there is no such tab.
        """
        self.active = self._context.pages[index]
        await self.active.bring_to_front()

    async def wait_for_download(self, limit_seconds: float) -> bool:
        """Return whether a download has started since the last result, or starts within the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._download_started.wait()
        return self._download_started.is_set()

    async def wait_until_loaded(self, limit_seconds: float) -> bool:
        """Wait until the active tab has loaded its new page; return whether it loaded in time.

        Until then, the browser answers no request about the tab.
        """
        await asyncio.sleep(SETTLE_SECONDS)  # time for the action's consequences to start
        try:
            async with asyncio.timeout(limit_seconds):
                while self.active in self._loading:
                    self._load_finished.clear()
                    await self._load_finished.wait()
        except TimeoutError:
            return False
        with suppress(Error):
            await self.active.wait_for_load_state("load", timeout=LOAD_LIMIT_SECONDS * 1000)
        return True

    async def stop_loading(self) -> None:
        """Stop loading in the active tab."""
        self._loading.pop(self.active, None)
        with suppress(TimeoutError, Error):  # a busy page does not respond to this either
            async with asyncio.timeout(STOP_LIMIT_SECONDS):
                session = await self._context.new_cdp_session(self.active)
                await session.send("Page.stopLoading")
                await session.detach()

    async def finish_downloads(self) -> None:
        """Wait for all downloads; cancel them if they become too large."""
        while self._downloads:
            await asyncio.wait(self._downloads, timeout=MEASURE_SECONDS)
            if self._in_flight and await asyncio.to_thread(_size_of, self._arriving) > MAX_ARRIVING_BYTES:
                await self.cancel_downloads(TOO_LARGE)

    async def cancel_downloads(self, reason: str = TOO_SLOW) -> None:
        """Cancel unfinished downloads: one that never ends would block all later actions."""
        for download in list(self._in_flight):
            self.note(f"The download of {shorten_url(download.url)} was given up: {reason}. {BY_SHELL}")
            with suppress(TimeoutError, Error):
                async with asyncio.timeout(STOP_LIMIT_SECONDS):
                    await download.cancel()
        self._in_flight.clear()
        if self._downloads:
            await asyncio.wait(self._downloads, timeout=STOP_LIMIT_SECONDS)

    def _on_page_opened(self, page: Page) -> None:
        self._watch(page)
        if len(self._context.pages) > MAX_TABS:
            self.note(f"A new tab was closed at once: {MAX_TABS} are allowed.")
            self._keep(page.close())
            return
        self.active = page

    def _watch(self, page: Page) -> None:
        page.on("dialog", self._answer_dialog)
        page.on("download", self._download)
        page.on("crash", self._note_crash)
        page.on("close", self._on_page_closed)
        page.on("request", self._note_request)
        page.on("response", self._note_response)
        page.on("requestfailed", self._note_failure)
        page.on("console", lambda message: self.log.add_message(message.type, message.text))
        page.on("pageerror", lambda error: self.log.add_error(str(error)))

    def _note_request(self, request: Request) -> None:
        with suppress(Error):  # the request belongs to no page, or its page is gone
            page = request.frame.page
            if request.is_navigation_request() and request.frame is page.main_frame:
                self._loading[page] = request

    def _note_response(self, response: Response) -> None:
        self._note_answer(response.request)
        if response.status >= FAILED_STATUS:
            self.log.add_failure(response.request.method, response.url, f"{response.status} {response.status_text}")

    def _note_failure(self, request: Request) -> None:
        self._note_answer(request)
        self.log.add_failure(request.method, request.url, request.failure or "no answer")

    def _note_answer(self, request: Request) -> None:
        for page, awaited in list(self._loading.items()):
            if awaited is request:
                del self._loading[page]
                self._load_finished.set()

    def _note_crash(self, page: Page) -> None:
        self._crashed.add(page)

    def _on_page_closed(self, page: Page) -> None:
        self._crashed.discard(page)
        if self._loading.pop(page, None) is not None:
            self._load_finished.set()
        left = [other for other in self._context.pages if other is not page]
        if self.active is page and left:
            self.active = left[-1]

    async def _answer_dialog(self, dialog: Dialog) -> None:
        is_accepted = self.accepts_dialogs or dialog.type in ("alert", "beforeunload")
        how = "accepted" if is_accepted else "dismissed"
        self.note(f"The page showed a dialog ({dialog.type}), which was {how}: {dialog.message[:MAX_SHOWN_CHARS]}")
        with suppress(Error):  # its tab was closed meanwhile
            if is_accepted and dialog.type == "prompt":
                await dialog.accept(self.dialog_text)
            elif is_accepted:
                await dialog.accept()
            else:
                await dialog.dismiss()

    def _download(self, download: Download) -> None:
        self._download_started.set()
        self._in_flight.add(download)
        self._keep(self._save(download))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._downloads.add(task)
        task.add_done_callback(self._downloads.discard)

    async def _save(self, download: Download) -> None:
        try:
            source = await download.path()
            target = await asyncio.to_thread(
                _copy_to_workspace, Path(source), self._folder, download.suggested_filename
            )
        except (OSError, Error) as error:
            if download in self._in_flight:  # otherwise it was cancelled and a note says so
                reason = str(error).partition("\n")[0][:MAX_SHOWN_CHARS]
                self.note(f"The download of {shorten_url(download.url)} failed: {reason}")
            return
        finally:
            self._in_flight.discard(download)
        self._saved.append(target)


def shorten_url(url: str) -> str:
    """Return an address, truncated for display; addresses can have megabytes."""
    return url if len(url) <= MAX_URL_CHARS else f"{url[:MAX_URL_CHARS]}… ({len(url)} characters)"


def _copy_to_workspace(source: Path, folder: Path, suggested: str) -> Path:
    """Copy a downloaded file into the workspace under a name that does not exist there."""
    name = _UNFIT.sub("_", suggested).strip(". ")[-150:] or "download"
    stem, dot, ending = name.rpartition(".")
    for number in range(1, 10_000):
        if number == 1:
            target = folder / name
        elif dot and stem:
            target = folder / f"{stem}-{number}.{ending}"
        else:
            target = folder / f"{name}-{number}"
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "wb") as file, source.open("rb") as content:
            while chunk := content.read(1 << 20):
                file.write(chunk)
        return target
    raise FileExistsError(f"there are too many files named {name}")


def _size_of(folder: Path) -> int:
    """Return the total size of the files in a folder; files that disappear meanwhile are not counted."""
    size = 0
    with suppress(FileNotFoundError):
        for file in folder.iterdir():
            with suppress(FileNotFoundError):
                size += file.stat().st_size
    return size
