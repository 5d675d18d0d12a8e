"""The developer messages of pages: console messages, script errors, failed requests.

Holds: size is bounded, whatever pages write. Errors and failed requests are reported once; the last `MAX_KEPT` messages
of all kinds are kept.
"""

from __future__ import annotations

from collections import deque

MAX_KEPT = 100
MAX_NEWS = 10
MAX_MESSAGE_CHARS = 300
FAILED_STATUS = 400
_REPEATED = "Failed to load resource"
"""The start of Chromium's own message about a failed request, which `add_failure` reports with its address."""
_EXPECTED_FAILURES = ("net::ERR_ABORTED", "net::ERR_BLOCKED_BY_CLIENT")
"""Errors of requests that also occur when a page is left or a file is downloaded."""


class PageLog:
    """Messages of all tabs, in order."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=MAX_KEPT)
        self._dropped = 0
        self._news: list[str] = []
        self._news_count = 0
        self._is_wanted = False

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

    def want_all(self) -> None:
        """Make the next `taken` return all messages."""
        self._is_wanted = True

    def taken(self) -> list[str]:
        """Return lines for the model, with a head: the new messages, or all of them after `want_all`."""
        if self._is_wanted:
            left_out = f"  ({self._dropped} older ones are gone)"
            lines = [*([left_out] if self._dropped else []), *(f"  {text}" for text in self._kept)] or ["  (nothing)"]
        else:
            lines = [f"  {text}" for text in self._news]
            if self._news_count > len(self._news):
                lines.append(f"  ({self._news_count - len(self._news)} more; console() shows them)")
        self._news, self._news_count, self._is_wanted = [], 0, False
        return ["[Console:]", *lines] if lines else []

    def _add(self, text: str, *, is_news: bool) -> None:
        text = " ".join(text.split())
        self._dropped += len(self._kept) == MAX_KEPT
        self._kept.append(text)
        if is_news:
            self._news_count += 1
            if len(self._news) < MAX_NEWS:
                self._news.append(text)
