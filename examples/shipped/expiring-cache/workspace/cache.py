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
        if len(self.store) >= self.size:
            self.store.drop_first()
        self.store.add(key, value, self.clock() + self.seconds)

    def get(self, key, default=None):
        """Return the value, or the default if there is none."""
        value, end = self.store.find(key)
        if not value or end < self.clock():
            return default
        return value

    def __contains__(self, key):
        return self.store.find(key)[0] is not None

    def __len__(self):
        return len(self.store)
