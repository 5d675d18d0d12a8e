"""Access over HTTP: API keys, tickets, idempotent requests, waiting uploads, and the record of operations.

Start with: api_keys.
"""
