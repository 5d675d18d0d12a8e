"""The log as messages for a model: the View, turns, observations in words.

May import: condensers, llm.
Start with: conversation_memory.
"""
