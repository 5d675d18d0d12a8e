"""What people do in a workspace beside the agent: files copied out of it and into it, and commands.

May import: nothing of this package.
Start with: files.
"""
