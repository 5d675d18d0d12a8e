"""Who may do what over HTTP: API keys, tickets, answers to repeated requests, the record of operations.

May import: nothing.
Start with: api_keys.
"""
