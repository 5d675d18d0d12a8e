"""What each kind of action does in a workspace, and what is observed of it.

May import: sandbox, workspace.
Start with: registry.
"""
