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
    sign = -1 if cents < 0 else 1
    parts = [divmod(abs(cents) * weight, total) for weight in weights]
    shares = [whole for whole, _ in parts]
    left = abs(cents) - sum(shares)
    for index in sorted(range(len(parts)), key=lambda index: -parts[index][1])[:left]:
        shares[index] += 1
    return [sign * share for share in shares]


def show(cents):
    """Write cents as a decimal amount."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def bill(cents, people):
    """Map each name to what is owed; people maps names to weights."""
    shares = split(cents, list(people.values()))
    return {name: show(share) for name, share in zip(people, shares)}
