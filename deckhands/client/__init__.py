"""The Python client: submit, follow, control and delete conversations.

May import: archive, reading, reasons, tasks, transfers.
Start with: client.
"""
