"""SDK agents: the Claude Agent SDK as the loop of a conversation, in an isolated process.

Start with: session.
"""
