"""The Python client: submit, follow and control conversations, and copy files.

May import: reading.
Start with: client.
"""
