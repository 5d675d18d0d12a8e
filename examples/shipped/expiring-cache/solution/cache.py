"""A cache with a limited size and age."""

import time

from store import Store


class Cache:
    """Keep what was used last, for some time."""

    def __init__(self, size, seconds, clock=time.monotonic):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self.seconds = seconds
        self.clock = clock
        self.store = Store()

    def put(self, key, value):
        """Keep a value."""
        now = self.clock()
        self.store.add(key, value, now + self.seconds)
        if len(self.store) > self.size:
            self.store.drop_expired(now)
        if len(self.store) > self.size:
            self.store.drop_first()

    def get(self, key, default=None):
        """Return the value, or the default if there is none."""
        if key not in self:
            return default
        self.store.touch(key)
        return self.store.find(key)[0]

    def __contains__(self, key):
        entry = self.store.find(key)
        return entry is not None and self.clock() < entry[1]

    def __len__(self):
        self.store.drop_expired(self.clock())
        return len(self.store)
