"""What a tool worker does for its node as a whole: identity, capacity, limits, removal of old workspaces.

Start with: reaper.
"""
