"""The Python client: submit, follow, control, read and delete conversations.

Start with: client.
"""
