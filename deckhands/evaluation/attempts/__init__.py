"""The attempts of an evaluation: when each begins, how people steer them, their progress and their results.

Start with: driver.
"""
