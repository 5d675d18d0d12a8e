"""Files of a workspace, reached from outside its sandbox so that no path and no link leads out of it.

Start with: openat2_paths.
"""
