"""Patterns as regular expressions."""


def translate(pattern):
    """Return the regular expression for a pattern."""
    return pattern.replace("**", ".*").replace("*", ".*").replace("?", ".")
