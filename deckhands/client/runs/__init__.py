"""One task from start to end, and the files that a run leaves.

Start with: headless.
"""
