"""The attempts of an evaluation: their pace, steering, progress and results.

Start with: driver.
"""
