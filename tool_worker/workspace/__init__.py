"""The workspaces of one node: their directories, the hosts that work in them, what they begin with.

May import: egress, host, sandbox, sessions.
Start with: workspaces.
"""
