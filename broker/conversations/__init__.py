"""Which conversations the store has: the index that listings show, selections of it, what expires, what is deleted.

May import: contract, limits, log, runtime, specs, store.
Start with: conversations.
"""
