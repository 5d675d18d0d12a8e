"""The workspace host: the one process of a conversation that owns its shell and edits its files.

Nothing outside this folder may be imported here: the host runs inside the sandbox on the bare standard library.
"""
