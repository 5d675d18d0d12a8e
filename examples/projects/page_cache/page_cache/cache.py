"""The cache itself: a dictionary in the order of last use, bounded by the bytes of its pages."""

from page_cache.statistics import Statistics


class PageCache:
    """Keeps rendered pages by URL path; the least recently used one goes first."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ValueError("a cache needs room for at least one byte")
        self.limit_bytes = limit_bytes
        self.statistics = Statistics()
        self._pages: dict[str, bytes] = {}  # the least recently used first
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, path: str) -> bytes | None:
        """Use a page; None if it is not in the cache."""
        if path not in self._pages:
            self.statistics.misses += 1
            return None
        self.statistics.hits += 1
        page = self._pages[path]
        return page

    def peek(self, path: str) -> bytes | None:
        """Look at a page without using it; None if it is not in the cache."""
        if path not in self._pages:
            return None
        page = self._pages[path]
        return page

    def put(self, path: str, page: bytes) -> bytes:
        """Add or replace a page and make room for it; a page larger than the cache is not kept."""
        self._drop(path)
        if len(page) <= self.limit_bytes:
            self._pages[path] = page
            self._size_bytes += len(page)
        while self._size_bytes > self.limit_bytes:
            self._drop(next(iter(self._pages)))
            self.statistics.evictions += 1
        return page

    def invalidate(self, path: str) -> int:
        """Drop a page and all pages below it, and count them."""
        below = path.rstrip("/") + "/"
        stale = [key for key in self._pages if key == path or key.startswith(below)]
        for key in stale:
            self._drop(key)
        return len(stale)

    def _drop(self, path: str) -> None:
        page = self._pages.pop(path, None)
        if page is not None:
            self._size_bytes -= len(page)
