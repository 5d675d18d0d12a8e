"""The Python client: submit, follow and control conversations, and copy files.

May import: archive, reading.
Start with: client.
"""
