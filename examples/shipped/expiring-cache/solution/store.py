"""Entries in order."""


class Store:
    """Values with the time when they end; what was used last comes last."""

    def __init__(self):
        self.entries = {}

    def add(self, key, value, end):
        self.entries.pop(key, None)
        self.entries[key] = (value, end)

    def find(self, key):
        return self.entries.get(key)

    def touch(self, key):
        self.entries[key] = self.entries.pop(key)

    def drop_first(self):
        del self.entries[next(iter(self.entries))]

    def drop_expired(self, now):
        for key in [key for key, (_, end) in self.entries.items() if end <= now]:
            del self.entries[key]

    def __len__(self):
        return len(self.entries)
