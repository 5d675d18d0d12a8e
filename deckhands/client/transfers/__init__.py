"""Access to a workspace beside the agent: copying files, and running commands.

Start with: files.
"""
