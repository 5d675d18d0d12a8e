"""Exports of attempts: a log and its row of results, in the formats of other tools and of training.

May import: reading.
Start with: dialogue.
"""
