"""One conversation as an object, asynchronous and blocking, on a private cluster or on one that runs.

May import: client, cluster, reading, reasons, remote, runs, tasks, transfers.
Start with: async_conversation.
"""
