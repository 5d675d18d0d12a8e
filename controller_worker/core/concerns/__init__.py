"""The concerns of a conversation. Each file holds one part of the state, its event handlers and its decisions.

Start with: greeting.
"""
