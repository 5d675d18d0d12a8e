"""In which order to build."""

from rules import named, read


class Cycle(Exception):
    """Targets need each other."""

    def __init__(self, path):
        super().__init__(" -> ".join(path))
        self.path = path


def order(text):
    """Return all targets, each after what it needs."""
    rules = read(text)
    places = {}
    for target, needs in named(text):
        for name in (target, *needs):
            places.setdefault(name, len(places))
    done = {}
    for start in rules:
        if start in done:
            continue
        path = {start: iter(rules[start])}
        while path:
            target, needs = next(reversed(path.items()))
            for need in needs:
                if need in path:
                    members = list(path)
                    members = members[members.index(need):]
                    first = members.index(min(members, key=places.get))
                    raise Cycle([*members[first:], *members[:first], members[first]])
                if need not in done:
                    path[need] = iter(rules.get(need, ()))
                    break
            else:
                path.popitem()
                done[target] = None
    return list(done)
