"""The log as messages for a model: the View, turns, observations in words.

Start with: conversation_memory.
"""
