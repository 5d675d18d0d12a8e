"""What a tool worker does for its node as a whole: identity, capacity, limits, removal of old workspaces.

May import: files, host, launch, sandbox.
Start with: reaper.
"""
