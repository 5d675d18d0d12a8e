"""What a log tells people: summaries, costs, lines for a terminal.

May import: nothing of this package.
Start with: summary.
"""
