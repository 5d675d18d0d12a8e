"""In which order to build."""

from rules import read


class Cycle(Exception):
    """Targets need each other."""

    def __init__(self, path):
        super().__init__(" -> ".join(path))
        self.path = path


def order(text):
    """Return all targets, each after what it needs."""
    rules = read(text)
    done = []

    def visit(target):
        if target in done:
            return
        done.append(target)
        for need in rules[target]:
            visit(need)

    for target in rules:
        visit(target)
    return done[::-1]
