"""One task from start to end, and the files that a run leaves.

May import: client, cluster, reading.
Start with: headless.
"""
