"""SDK agents: the Claude Agent SDK as the loop of a conversation, in a process that reaches nothing but this room.

May import: agents, core, llm, wires.
Start with: session.
"""
