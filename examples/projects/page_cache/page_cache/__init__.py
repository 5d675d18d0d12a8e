"""A cache of rendered pages."""
