"""The log as messages for a model: the View, turns, observations in words.

May import: messages.
Start with: conversation_memory.
"""
