"""Who works on what: ownership, heartbeats, wake-ups, action streams, files on their way between workers.

May import: contract, log, runtime, secrets, specs, store.
Start with: ownership.
"""
