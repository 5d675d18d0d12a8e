"""The connection to Valkey or Redis, the names of all keys, the atomic functions' deployment, the embedded server.

Start with: store.
"""
