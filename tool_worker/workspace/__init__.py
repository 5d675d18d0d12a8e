"""The workspaces of one node: opened for the first time or again, each with a directory and a host.

May import: files, launch, node, sandbox.
Start with: workspaces.
"""
