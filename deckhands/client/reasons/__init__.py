"""Explain why a conversation makes no progress: from its state to the cause, for the command, the server and Python.

Start with: chain.
"""
