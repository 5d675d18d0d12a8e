"""The attempts of an evaluation: when each begins, how people steer them, their progress and their results.

May import: cli, client, datasets, monitoring, reading.
Start with: driver.
"""
