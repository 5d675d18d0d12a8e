"""Sharing amounts of money, all in whole cents."""


def split(cents, weights):
    """Return the share of each participant, in the order of weights."""
    if not weights:
        raise ValueError("nobody to share with")
    if any(weight < 0 for weight in weights):
        raise ValueError("a weight is negative")
    total = sum(weights)
    if total == 0:
        raise ValueError("all weights are zero")
    return [int(cents * weight / total) for weight in weights]


def show(cents):
    """Write cents as a decimal amount."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def bill(cents, people):
    """Map each name to what is owed; people maps names to weights."""
    shares = split(cents, list(people.values()))
    return {name: show(share) for name, share in zip(people, shares)}
