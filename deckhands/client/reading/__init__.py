"""Readable forms of a log: summaries, costs, lines for a terminal.

Start with: summary.
"""
