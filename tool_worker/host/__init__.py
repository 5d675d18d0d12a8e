"""The process in the sandbox, one per conversation: shell, editor, search, sessions. Standard library only.

Start with: server.
"""
