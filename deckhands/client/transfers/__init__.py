"""What people do in a workspace beside the agent: files copied out of it and into it, and commands.

Start with: files.
"""
