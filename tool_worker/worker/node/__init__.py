"""What a tool worker does for its node as a whole: identity, capacity, limits, removal of old workspaces.

May import: files, launch, sandbox.
Start with: reaper.
"""
