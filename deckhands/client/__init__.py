"""The Python client: submit, watch, steer, and carry files.

May import: reading.
Start with: client.
"""
