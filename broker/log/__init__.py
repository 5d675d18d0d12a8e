"""The event log of each conversation: append, read, follow, fork; blobs; the index of conversations.

Start with: event_log.
"""
