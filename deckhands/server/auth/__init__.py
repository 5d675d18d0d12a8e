"""Who may do what over HTTP: API keys, tickets, answers to repeated requests, the record of operations.

Start with: api_keys.
"""
