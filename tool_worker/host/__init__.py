"""The workspace host: the one process of a conversation that owns its shell. Standard library only.

May import: editor.
Start with: server.
"""
