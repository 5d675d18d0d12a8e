"""How many columns text takes on a terminal."""


def width(text):
    """Return the number of columns."""
    return len(text)
