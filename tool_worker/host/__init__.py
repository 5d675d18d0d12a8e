"""The workspace host: one process per conversation that owns its shell and journals its actions. Standard library only.

May import: editor, shell.
Start with: server.
"""
