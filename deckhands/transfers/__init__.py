"""Files copied out of a workspace and into it: packed on this machine, sent to the cluster in parts.

May import: nothing of this package.
Start with: files.
"""
