"""One task from its beginning to its end, and the files a run leaves.

May import: client, cluster, reading.
Start with: headless.
"""
