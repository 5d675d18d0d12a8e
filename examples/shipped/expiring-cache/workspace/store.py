"""Entries in order."""


class Store:
    """Values with the time when they end, in the order of insertion."""

    def __init__(self):
        self.entries = {}

    def add(self, key, value, end):
        if key in self.entries:
            self.entries[key][0] = value
        else:
            self.entries[key] = [value, end]

    def find(self, key):
        return self.entries.get(key, (None, 0))

    def drop_first(self):
        del self.entries[next(iter(self.entries))]

    def __len__(self):
        return len(self.entries)
