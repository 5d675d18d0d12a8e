"""The browser of a workspace: opens pages and acts in them (OpenHands 10.6).

Holds: a page that turns out to be a download is reported as the downloaded file.
Differs: objects that the original stores (DOM, accessibility tree, properties of elements) are not kept; the text has
the parts that a model needs. Screenshots are not written into the workspace; they are in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import (
    BrowseInteractiveAction,
    BrowserOutputObservation,
    BrowseURLAction,
    ErrorObservation,
    FileDownloadObservation,
    Observation,
)
from tool_worker.tools.bash import DEFAULT_TIMEOUT_SECONDS
from tool_worker.tools.tool import HostRequest, Tool


class OpenPage(Tool):
    """Open a page and read it."""

    action = BrowseURLAction

    def request(self, action: BrowseURLAction) -> HostRequest:
        """See `Tool.request`."""
        form = "tree" if action.return_axtree else "text"
        return _make_request(f"goto({action.url!r})", action.timeout, form)

    def observe(self, action: BrowseURLAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        return _make_observation(result, "browse", f"goto({action.url!r})")


class ActInBrowser(Tool):
    """Run actions in the browser."""

    action = BrowseInteractiveAction

    def request(self, action: BrowseInteractiveAction) -> HostRequest:
        """See `Tool.request`."""
        return _make_request(action.browser_actions, action.timeout, "tree")

    def observe(self, action: BrowseInteractiveAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        return _make_observation(result, "browse_interactive", action.browser_actions)


def _make_request(actions: str, timeout: float | None, form: str) -> HostRequest:
    return HostRequest("browser", {"actions": actions, "timeout": timeout or DEFAULT_TIMEOUT_SECONDS, "form": form})


def _make_observation(result: Mapping[str, Any], trigger: str, actions: str) -> Observation:
    content = str(result.get("content", ""))
    if result.get("is_error"):
        return ErrorObservation(content=content, error_id="session_ended")
    downloads = [path for path in result.get("downloads") or () if isinstance(path, str)]
    if downloads and result.get("is_download"):
        return FileDownloadObservation(content=content, file_path=downloads[0])
    error = str(result.get("error") or "")
    return BrowserOutputObservation(
        content=content,
        url=str(result.get("url") or ""),
        trigger_by_action=trigger,
        screenshot=str(result.get("screenshot") or ""),
        set_of_marks=str(result.get("set_of_marks") or ""),
        error=bool(error),
        open_pages_urls=tuple(str(url) for url in result.get("open_pages_urls") or ()),
        active_page_index=int(result.get("active_page_index", -1)),
        last_browser_action=actions,
        last_browser_action_error=error,
        focused_element_bid=str(result.get("focused_element_bid") or ""),
    )
