"""Access to a workspace's files from outside its sandbox, so that no path and no link leads out of the workspace.

Start with: openat2_paths.
"""
