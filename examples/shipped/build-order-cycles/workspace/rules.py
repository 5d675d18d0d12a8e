"""Reading rules."""


def read(text):
    """Map each target to the list of its needs, in the order of the file."""
    rules = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        target, needs = line.split(":")
        rules[target.strip()] = needs.split()
    return rules
