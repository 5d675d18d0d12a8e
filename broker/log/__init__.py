"""The event log of each conversation: append, read, follow, fork; blobs beside it; its invariants.

May import: contract, runtime, secrets, specs, store.
Start with: event_log.
"""
