"""Exports of attempts: a log and its row of results, in the formats of other tools and of training.

Start with: dialogue.
"""
