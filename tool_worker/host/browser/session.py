"""The session program of the browser: runs actions and returns a view of the page; see `session_program`.

Holds: every call is answered, whatever happens to the page or to Chromium. The tab of a page that does not respond is
closed, a dead Chromium is replaced, and the model is notified of both. A cancelled call is answered at once. After
`IDLE_SECONDS` without a call, the program ends together with Chromium.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started by its path, as a separate program
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from playwright.async_api import Error

from tool_worker.host.browser.action_strings import ActionStringError, BrowserCall, parse_actions
from tool_worker.host.browser.chromium import Chromium, ChromiumFailed
from tool_worker.host.browser.page_actions import ActionFailed, PageActions
from tool_worker.host.browser.page_tree import render_page, render_reading
from tool_worker.host.browser.page_view import PageSilent, PageView, read_text, view_page
from tool_worker.host.browser.set_of_marks import render_pictures
from tool_worker.host.browser.tabs import Tabs, shorten_url
from tool_worker.host.descendants import kill_descendants
from tool_worker.host.sessions.session_wire import Result, serve

DEFAULT_TIMEOUT_SECONDS = 120.0
IDLE_SECONDS = 900.0
LOAD_LIMIT_SECONDS = 30.0
VIEW_ATTEMPTS = 4
VIEW_RETRY_SECONDS = 0.2

ENDED = "Chromium had ended; this is a new one: the tabs and logins of the one before are gone."
CANCELLED = "The action was cancelled. It may have taken effect in part."
SILENT = "The page did not answer: a program in it keeps it busy. Its tab was closed."
CRASHED = "The page crashed. Its tab was closed."
NOT_LOADED = "The page that was asked for did not come in time; waiting for it was given up."
DIED = "Chromium ended during the action. The next action starts a new one; tabs and logins are gone."


class BrowserSession:
    """The browser of a conversation, started by its first call.

    Args:
        executable: The path of Chromium.
        folder: The workspace; downloads are saved there.
        idle_seconds: Time without a call after which the program ends.
    """

    def __init__(self, executable: str, folder: Path, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._executable = executable
        self._folder = folder
        self._chromium: Chromium | None = None
        self._tabs: Tabs | None = None
        self._view = PageView()
        self._running: asyncio.Task[Result] | None = None
        self._is_cancelled = False
        self._idle: asyncio.TimerHandle | None = None

    async def call(self, arguments: dict[str, Any]) -> Result:
        """Run actions and return a view of the page."""
        if self._idle is not None:
            self._idle.cancel()
        self._is_cancelled = False
        self._running = asyncio.create_task(self._run_call(arguments))
        try:
            return await self._running
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            return await self._answer_cancelled()
        except ChromiumFailed as error:
            return {"content": f"ERROR: {error}", "is_error": True}
        finally:
            self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, _end_program)

    async def interrupt(self) -> None:
        """Stop the running call."""
        if self._running is not None:
            self._is_cancelled = True
            self._running.cancel()

    async def _run_call(self, arguments: dict[str, Any]) -> Result:
        seconds = float(arguments.get("timeout") or DEFAULT_TIMEOUT_SECONDS)
        is_reading = arguments.get("form") == "text"
        deadline = asyncio.get_running_loop().time() + seconds
        tabs = await self._get_tabs(seconds)
        error = ""
        is_download = False
        try:
            calls = parse_actions(str(arguments["actions"]))
            async with asyncio.timeout_at(deadline):
                is_download = await self._perform_all(tabs, calls, Path(arguments.get("cwd") or self._folder))
                await tabs.finish_downloads()
        except (ActionStringError, ActionFailed, PageSilent, Error) as failure:
            error = str(failure)
        except TimeoutError:
            error = f"The action did not end within {seconds:g} seconds and was given up."
            await tabs.stop_loading()
            await tabs.cancel_downloads()
        return await self._observe(tabs, error, deadline, is_reading=is_reading) | {"is_download": is_download}

    async def _get_tabs(self, seconds: float) -> Tabs:
        """Return the tabs of a live Chromium; start one if necessary."""
        if self._chromium is None or self._tabs is None or not await self._chromium.is_responding():
            is_first = self._chromium is None
            if self._chromium is not None:
                ended, self._chromium, self._tabs = self._chromium, None, None
                await ended.end()
            try:
                async with asyncio.timeout(seconds):
                    self._chromium = await Chromium.start(self._executable)
            except TimeoutError as error:
                raise ChromiumFailed(f"Chromium did not start within {seconds:g} seconds.") from error
            self._tabs = Tabs(self._chromium.context, self._folder, self._chromium.downloads)
            self._view = PageView()
            if not is_first:
                self._tabs.note(ENDED)
        return self._tabs

    async def _perform_all(self, tabs: Tabs, calls: list[BrowserCall], folder: Path) -> bool:
        """Run actions in order until one fails; return whether the last one only started a download."""
        page = tabs.active
        is_download = False
        for number, call in enumerate(calls):
            if tabs.active is not page:  # the next bids belong to another page
                page = tabs.active
                self._view = await view_page(page)
            actions = PageActions(tabs, self._view.frames, folder)
            try:
                await actions.perform(call)
                is_download = actions.is_download
            except ActionFailed as failure:
                left = len(calls) - number - 1
                rest = f"\nThe {left} actions after it were not carried out." if left else ""
                where = f"{call.text}: " if len(calls) > 1 else ""
                raise ActionFailed(f"{where}{failure}{rest}") from failure
        return is_download

    async def _observe(self, tabs: Tabs, error: str, deadline: float, *, is_reading: bool) -> Result:
        """View the page and return the result of the call."""
        text = ""
        self._view = PageView()
        for attempt in range(VIEW_ATTEMPTS):
            page = tabs.active
            try:
                if self._chromium is None or not await self._chromium.is_responding():
                    return self._without_page(f"{error}\n{DIED}".strip())
                if tabs.is_crashed:
                    error = f"{error}\n{CRASHED}".strip()
                    await tabs.close(page)
                    continue
                if not await tabs.wait_until_loaded(
                    min(LOAD_LIMIT_SECONDS, max(deadline - asyncio.get_running_loop().time(), 0))
                ):
                    tabs.note(NOT_LOADED)
                    await tabs.stop_loading()
                if is_reading:
                    text = await read_text(page)
                    self._view = PageView(url=page.url)
                else:
                    self._view = await view_page(page)
                if page is tabs.active:
                    break
            except PageSilent:
                error = f"{error}\n{SILENT}".strip()
                await tabs.close(page)
            except Error as failure:  # the page was left for another one during the view
                if attempt == VIEW_ATTEMPTS - 1 and not error:
                    error = f"The page cannot be looked at: {str(failure).partition(chr(10))[0]}"
                await asyncio.sleep(VIEW_RETRY_SECONDS)
        return self._result(tabs, error, text, is_reading=is_reading)

    def _result(self, tabs: Tabs, error: str, text: str, *, is_reading: bool) -> Result:
        notes, saved = tabs.take_news()
        view = self._view
        names = [str(path) for path in saved]
        notes += [f"Downloaded to {name}" for name in names]
        url = shorten_url(view.url or tabs.active.url)
        urls = tabs.urls
        active = tabs.active_index
        console = tabs.log.take_lines()
        content = (
            render_reading(url=url, error=error, notes=notes, text=text, console=console)
            if is_reading
            else render_page(
                url=url,
                focused_bid=view.focused_bid,
                tabs=urls,
                active=active,
                error=error,
                notes=notes,
                tree=view.tree,
                console=console,
            )
        )
        plain = marked = ""
        if view.png:
            with suppress(OSError):
                plain, marked = render_pictures(view.png, view.marks)
        return {
            "content": content,
            "url": url,
            "error": error,
            "screenshot": plain,
            "set_of_marks": marked,
            "open_pages_urls": urls,
            "active_page_index": active,
            "focused_element_bid": view.focused_bid,
            "downloads": names,
        }

    def _without_page(self, error: str) -> Result:
        content = render_page(url="", focused_bid="", tabs=(), active=-1, error=error, notes=(), tree="")
        return {"content": content, "url": "", "error": error}

    async def _answer_cancelled(self) -> Result:
        """Stop the page from loading and answer at once."""
        if self._tabs is None:
            return self._without_page(CANCELLED)
        await self._tabs.stop_loading()
        await self._tabs.cancel_downloads()
        self._view = PageView()
        return self._result(self._tabs, CANCELLED, "", is_reading=False)


def _end_program() -> None:
    """End this program and Chromium."""
    kill_descendants(os.getpid())
    os._exit(0)


def main() -> None:
    """Serve the workspace host that started this program with Chromium's path and, optionally, an idle time."""
    session = BrowserSession(sys.argv[1], Path.cwd(), *map(float, sys.argv[2:]))
    asyncio.run(serve(session.call, session.interrupt))


if __name__ == "__main__":
    main()
