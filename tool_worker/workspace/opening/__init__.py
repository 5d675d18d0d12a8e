"""Fills new workspaces from their source: clones repositories and unpacks archives, in the sandbox.

Start with: workspace_opener.
"""
