"""What a log tells people: summaries, costs, lines for a terminal.

Start with: summary.
"""
