"""Who works on what: ownership, heartbeats, wake-ups, action streams, files on their way between workers.

Start with: ownership.
"""
