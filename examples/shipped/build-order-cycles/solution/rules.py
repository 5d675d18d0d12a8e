"""Reading rules."""


def named(text):
    """Yield each target with its needs, line by line."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition("#")[0]
        if line.strip():
            target, needs = line.split(":")
            yield target.strip(), needs.split()


def read(text):
    """Map each target to the list of its needs, in the order of the file."""
    rules = {}
    for target, needs in named(text):
        rules.setdefault(target, []).extend(needs)
    return rules
