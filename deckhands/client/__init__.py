"""The Python client: submit, follow, control and delete conversations.

May import: reading, tasks, transfers.
Start with: client.
"""
