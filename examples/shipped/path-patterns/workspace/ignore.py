"""Which paths to leave out."""

import re

from patterns import translate


class Rules:
    """The patterns of a file."""

    def __init__(self, text):
        self.rules = []
        for line in text.splitlines():
            line = line.strip()
            if line and not line.startswith("#"):
                self.rules.append(re.compile(translate(line)))

    def ignored(self, path):
        """Return whether the path should be left out."""
        return any(rule.fullmatch(path) for rule in self.rules)
