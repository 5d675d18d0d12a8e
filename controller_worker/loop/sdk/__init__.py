"""SDK agents: the Claude Agent SDK as the loop of a conversation, in a process that reaches nothing but this room.

Start with: session.
"""
