"""Tasks of a tool worker for its node as a whole: disk and resource limits, removal of old workspaces.

Start with: reaper.
"""
