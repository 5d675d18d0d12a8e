"""Tools: what each kind of action does in a workspace, and the observation that answers it.

May import: nothing of this package.
Start with: registry.
"""
