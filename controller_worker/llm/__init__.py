"""The one protocol that every model is called through, its configuration, and what wraps a model.

May import: messages.
Start with: llm.
"""
