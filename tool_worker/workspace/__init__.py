"""The workspaces of a node: opened, checked, launched, checkpointed, and their files.

Start with: workspaces.
"""
